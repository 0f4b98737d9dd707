#include "group.h"

#include <time.h>

#include <algorithm>

#include "settings.h"

namespace fake::nccl {
namespace {

struct Pending {
  std::shared_ptr<Comm> comm;
  std::shared_ptr<Work> work;
  std::vector<Stream*> streams;
};

struct Job {
  std::shared_ptr<Comm> comm;
  std::function<Result()> run;
};

struct Group {
  int depth = 0;
  Result error = kSuccess;  // of a call inside
  std::vector<Pending> pending;
  std::vector<Job> jobs;
};
thread_local Group group;

Result failed(Result error) {
  group.error = error;
  return error;
}

Result pending_of(const std::shared_ptr<Comm>& comm, void* handle, Pending** out) {
  Stream* stream = driver().stream(comm->device(), handle);
  if (!stream) return failed(kInvalidArgument);
  auto found = std::find_if(group.pending.begin(), group.pending.end(), [&](auto& each) { return each.comm == comm; });
  if (found == group.pending.end()) {
    group.pending.push_back({comm, std::make_shared<Work>(), {}});
    found = std::prev(group.pending.end());
  }
  auto& streams = found->streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  *out = &*found;
  return kSuccess;
}

// A communicator that does not block launches from a thread of its own, after the call has returned (as NCCL's
// ncclGroupEnd does): here only once somebody asks for its state or ends it, and noticeably later than that, so that
// whoever does not wait for it is found out, however slow the machine.
Result launch(Pending& pending) {
  std::shared_ptr<Comm> comm = pending.comm;
  if (comm->blocking()) {
    if (Result result = comm->connect(pending.work->messages)) return result;
    return comm->enqueue(pending.work, pending.streams);
  }
  comm->in_background([comm, work = pending.work, streams = pending.streams] {
    comm->wait_until_asked();
    timespec nap{0, 2'000'000};
    nanosleep(&nap, nullptr);
    return comm->enqueue(work, streams);
  });
  return kInProgress;
}

Result run_jobs(std::vector<Job> jobs) {
  if (jobs.size() == 1 && jobs[0].comm->blocking()) return jobs[0].run();
  Result result = kSuccess;
  std::vector<std::thread> threads;
  std::vector<Result> results(jobs.size(), kSuccess);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (!jobs[i].comm->blocking()) {
      jobs[i].comm->in_background(jobs[i].run);
      result = kInProgress;
    } else {
      threads.emplace_back([&results, &jobs, i] { results[i] = jobs[i].run(); });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (Result each : results) {
    if (each != kSuccess) result = each;
  }
  return result;
}

}  // namespace

Result group_start() {
  ++group.depth;
  return kSuccess;
}

Result group_end() {
  if (group.depth == 0) return kInvalidUsage;
  if (--group.depth > 0) return kSuccess;
  Group ended;
  std::swap(ended, group);
  if (ended.error != kSuccess) return ended.error;
  Result result = ended.jobs.empty() ? kSuccess : run_jobs(std::move(ended.jobs));
  for (Pending& each : ended.pending) {
    Result launched = launch(each);
    if (launched != kSuccess) result = launched;
  }
  return result;
}

Result add(std::shared_ptr<Comm> comm, const Collective& collective, void* stream) {
  group_start();
  Pending* pending = nullptr;
  if (pending_of(comm, stream, &pending) == kSuccess) pending->work->collectives.push_back(collective);
  return group_end();
}

Result add(std::shared_ptr<Comm> comm, const Message& message, void* stream) {
  group_start();
  Pending* pending = nullptr;
  if (pending_of(comm, stream, &pending) == kSuccess) pending->work->messages.push_back(message);
  return group_end();
}

Result add(std::shared_ptr<Comm> comm, std::function<Result()> job) {
  group_start();
  group.jobs.push_back({std::move(comm), std::move(job)});
  return group_end();
}

}  // namespace fake::nccl
