#include "proxy/proxy.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "proxy/lane.h"
#include "proxy/worker.h"
#include "transport/tcp.h"

namespace hetcoll {

Proxy::Proxy(const ProxyOptions& options)
    : options_(options), injector_(FaultSpec::Parse(options.fault), options.rank), pid_(getpid()) {
  // The two ends of a link that misbehaves share state.
  if (!options_.fault.empty()) options_.threads = 1;
  for (unsigned i = 0; i < options_.threads; ++i) AddWorker();
}

ProxyWorker& Proxy::AddWorker() {
  const auto failed = [this](const Fault& fault, int peer, const std::string& where) {
    const std::string text = std::string(fault.what()) + " (" + where + ")";
    {
      std::lock_guard lock(mutex_);
      if (trying_ && peer >= 0) {
        problems_.try_emplace(peer, text);
        return true;
      }
    }
    Break(fault.kind, fault.peer, text);
    return false;
  };
  const auto told = [this](std::vector<std::string> events) {
    {
      std::lock_guard lock(mutex_);
      events_.insert(events_.end(), events.begin(), events.end());
    }
    news_.notify_all();
  };
  return *workers_.emplace_back(std::make_unique<ProxyWorker>(options_.oversubscribed, failed, told));
}

Proxy::~Proxy() {
  if (getpid() == pid_) {
    Close();
  } else {  // the threads are the parent's, and so are the connections
    for (auto& worker : workers_) worker->Abandon();
  }
}

void Proxy::Connect(int peer, int channel, std::span<const int> fds) {
  Links& links = links_[{peer, channel}];
  for (std::uint32_t i = 0; i < fds.size(); ++i) {
    const SocketId id{peer, channel, i};
    ProxyWorker* worker = workers_[turn_++ % options_.threads].get();
    const auto shared = Share();
    links.ends.push_back(injector_.Wrap(MakeTcp(MakeSockets(fds.subspan(i, 1), id, shared), shared), 1, peer, channel));
    links.workers.push_back(worker);
    std::lock_guard lock(mutex_);
    menders_[id] = worker;
  }
}

int Proxy::MendTcp() {
  std::lock_guard lock(mutex_);
  if (mending_ == nullptr) mending_ = std::make_shared<Mending>();
  return mending_->fd();
}

std::vector<LostSocket> Proxy::TakeLost() { return mending_->TakeLost(); }

// On the thread of that socket.
template <class Fn, class Result>
Result Proxy::AskMending(const SocketId& id, Fn&& ask, Result none) {
  ProxyWorker* worker = nullptr;
  {
    std::lock_guard lock(mutex_);
    const auto found = menders_.find(id);
    if (!stopped_ && found != menders_.end()) worker = found->second;
  }
  return worker == nullptr ? none : worker->AskResumed([&](Mending::Resumed& resumed) { return ask(resumed); });
}

bool Proxy::IsLost(const SocketId& id) {
  return AskMending(id, [&](Mending::Resumed&) { return mending_->IsLost(id); }, false);
}

std::optional<Came> Proxy::HoldSocket(const SocketId& id, std::uint32_t number, bool first) {
  return AskMending(id, [&](Mending::Resumed&) { return mending_->Hold(id, number, first); }, std::optional<Came>{});
}

bool Proxy::ResumeSocket(const SocketId& id, std::uint32_t number, int socket, const Came& came) {
  try {
    return AskMending(
        id, [&](Mending::Resumed& resumed) { return mending_->Resume(id, number, socket, came, resumed); }, false);
  } catch (const Fault& fault) {
    Break(fault.kind, fault.peer, fault.what());
    return true;
  }
}

void Proxy::GiveUpSocket(const SocketId& id, const std::string& why) {
  AskMending(id, [&](Mending::Resumed&) { return mending_->GiveUp(id, why), true; }, false);
}

std::map<int, std::uint64_t> Proxy::Undelivered() {
  return mending_->ByPeer([&](const SocketId& id) {
    return AskMending(id, [&](Mending::Resumed&) { return mending_->Undelivered(id); }, std::uint64_t{0});
  });
}

std::uint64_t Proxy::reconnects() {
  std::lock_guard lock(mutex_);
  return mending_ == nullptr ? 0 : mending_->made.load();
}

// For one link, since each worker has links of its own.
std::shared_ptr<TcpShared> Proxy::Share() {
  std::lock_guard lock(mutex_);
  tcp_.push_back(std::make_shared<TcpShared>(options_.integrity, injector_.tcp()));
  tcp_.back()->mending = mending_;
  return tcp_.back();
}

ProxyWorker& Proxy::VerbsWorker() {
  if (verbs_ == nullptr) {
    verbs_ = &AddWorker();
    std::lock_guard lock(mutex_);
    if (stopped_) verbs_->Stop();
    if (let_go_) verbs_->LetGo();
  }
  return *verbs_;
}

int Proxy::AddNic(NicInfo info, const VerbsApi& api) {
  ProxyWorker& worker = VerbsWorker();
  return worker.AskVerbs([&](std::unique_ptr<VerbsHost>& host) {
    if (host == nullptr) {
      host = std::make_unique<VerbsHost>(api, Share(), worker.has_events());
    }
    return host->AddNic(std::move(info));
  });
}

void Proxy::ConnectVerbs(int peer, int channel, const ProxyVerbs& link, std::span<const int> fds) {
  ProxyWorker& worker = VerbsWorker();
  {
    std::lock_guard lock(mutex_);
    for (std::uint32_t i = 0; i < fds.size(); ++i) menders_[{peer, channel, i}] = &worker;
  }
  LinkEnds ends = worker.AskVerbs([&](std::unique_ptr<VerbsHost>& host) {
    if (host == nullptr) {
      for (const int fd : fds) close(fd);
      throw Fault(FaultKind::kSystem, peer, "verbs: the proxy has no NICs");
    }
    return host->Attach({options_.rank, peer, channel, link.ring_bytes, link.recovery_ns, link.copier, link.pinned},
                        link.rails, fds);
  });
  Links& links = links_[{peer, channel}];
  links.verbs = true;
  links.ends.push_back(injector_.Wrap(std::move(ends), 1, peer, channel));
}

int Proxy::RegisterMemory(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
                          std::optional<std::uintptr_t> seen_at) {
  return VerbsWorker().AskVerbs([&](std::unique_ptr<VerbsHost>& host) {
    return host == nullptr ? 0 : host->regions().Add(address, nbytes, keys, seen_at);
  });
}

bool Proxy::UnregisterMemory(int handle) {
  return VerbsWorker().AskVerbs(
      [&](std::unique_ptr<VerbsHost>& host) { return host == nullptr || host->regions().Remove(handle); });
}

void Proxy::Try(bool on) {
  std::lock_guard lock(mutex_);
  trying_ = on;
  if (on) problems_.clear();
}

std::string Proxy::Problem(int peer) const {
  std::lock_guard lock(mutex_);
  const auto found = problems_.find(peer);
  return found == problems_.end() ? "" : found->second;
}

void Proxy::Leave(int peer) {
  for (auto& worker : workers_) worker->Leave(peer);
  std::lock_guard lock(mutex_);
  problems_.erase(peer);
}

std::string Proxy::DescribeLinks() {
  if (verbs_ == nullptr) return "[]";
  return verbs_->AskVerbs(
      [](std::unique_ptr<VerbsHost>& host) { return host == nullptr ? std::string("[]") : host->Describe(); });
}

IntegrityCounts Proxy::integrity() {
  std::lock_guard lock(mutex_);
  IntegrityCounts sum;
  for (const auto& link : tcp_) sum += link->counts;
  return sum;
}

std::vector<std::pair<std::string, std::uint64_t>> Proxy::Counters() {
  if (verbs_ == nullptr) return {};
  return verbs_->AskVerbs([](std::unique_ptr<VerbsHost>& host) {
    return host == nullptr ? std::vector<std::pair<std::string, std::uint64_t>>{} : host->Counters();
  });
}

std::vector<std::string> Proxy::TakeEvents() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::shared_ptr<ProxyEdge> Proxy::AddEdge(int peer, int channel, bool out, const Slots& slots) {
  auto edge = std::make_shared<ProxyEdge>(shared_from_this(), options_.part_bytes);
  const auto ended = std::make_shared<PartsEnded>(slots.count);
  Links& links = links_.at({peer, channel});
  if (links.verbs && slots.count > kClearToSends) {
    throw Fault(FaultKind::kSystem, peer,
                "at most " + std::to_string(kClearToSends) + " slots were wanted, got " + std::to_string(slots.count));
  }
  for (std::size_t i = 0; i < links.ends.size(); ++i) {
    LinkEnds& link = links.ends[i];
    LinkEnds end;
    if (out) {
      end.send = std::move(link.send);
    } else {
      end.recv = std::move(link.recv);
    }
    auto lane = std::make_unique<ProxyLane>(peer, channel, slots, ended, std::move(end), links.verbs);
    ProxyWorker* worker = links.verbs ? verbs_ : links.workers[i];
    worker->Own(lane.get());
    edge->lanes_.emplace_back(worker, lane.get());
    std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  }
  return edge;
}

void ProxyEdge::Post(const ProxyMessage& m) const {
  const std::size_t parts = std::clamp<std::size_t>(m.nbytes / part_bytes_, 1, lanes_.size());
  for (std::size_t i = 0; i < parts; ++i) {
    const auto& [worker, lane] = lanes_[(m.number + i) % lanes_.size()];
    const std::size_t begin = m.nbytes * i / parts;
    const std::size_t end = m.nbytes * (i + 1) / parts;
    worker->Post(lane, {m.number, m.signature, begin, end - begin, static_cast<unsigned>(parts)});
  }
}

bool Proxy::Idle() const {
  std::lock_guard lock(mutex_);
  return stopped_ || std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->idle(); });
}

void Proxy::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  news_.notify_all();
  for (auto& worker : workers_) worker->Stop();
}

void Proxy::Break(FaultKind kind, int peer, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) failure_ = {kind, peer, text};
  }
  Stop();
}

void Proxy::Fail(FaultKind kind, int peer, const std::string& text) {
  Break(kind, peer, text);
  {
    std::lock_guard lock(mutex_);
    let_go_ = true;
  }
  for (auto& worker : workers_) worker->LetGo();
}

Failure Proxy::AwaitFailure(std::int64_t until) {
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until));
  news_.wait_until(lock, limit, [&] { return stopped_ || !events_.empty(); });
  return failure_;
}

void Proxy::Close(std::int64_t until) {
  bool sound = false;
  {
    std::lock_guard lock(mutex_);
    sound = failure_.kind == FaultKind::kNone;
  }
  Stop();
  for (auto& worker : workers_) worker->Join();
  if (verbs_ != nullptr) {
    verbs_->AskVerbs([&](std::unique_ptr<VerbsHost>& host) {
      if (host != nullptr && sound) host->Drain(until);
    });
  }
  {
    std::lock_guard lock(mutex_);
    for (auto& lane : lanes_) lane->Close();
    if (mending_ != nullptr) mending_->Close();
    links_.clear();
  }
  if (verbs_ != nullptr) {
    verbs_->AskVerbs([](std::unique_ptr<VerbsHost>& host) { host.reset(); });
  }
}

std::string Proxy::Describe() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& lane : lanes_) {
    const std::string one = lane->Describe();
    if (!one.empty()) out += (out.empty() ? "" : "; ") + one;
  }
  return out;
}

std::uint64_t Proxy::moves() const {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& lane : lanes_) sum += lane->moves();
  return sum;
}

}  // namespace hetcoll
