// A thread that moves the messages of some of a proxy's lanes, and looks after RDMA links where these have some.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "proxy/proxy.h"
#include "transport/tcp_mending.h"
#include "transport/verbs/verbs.h"

namespace hetcoll {

class ProxyWorker {
 public:
  using Failed = std::function<bool(const Fault&, int peer, const std::string& where)>;
  using Told = std::function<void(std::vector<std::string>)>;

  // `failed` and `told` (what became of RDMA links) are called on the thread. `failed` says whether the links to that
  // peer are to be left, so that the others go on.
  ProxyWorker(bool oversubscribed, Failed failed, Told told);
  ~ProxyWorker();
  ProxyWorker(const ProxyWorker&) = delete;
  ProxyWorker& operator=(const ProxyWorker&) = delete;

  void Own(ProxyLane* lane);
  void Post(ProxyLane* lane, const ProxyPart& m);
  // Nothing goes to or comes from this peer any more over the lanes there are; streams that wait for it are let go.
  void Leave(int peer);
  // Nothing moves any more. Streams go on waiting for what lies still, until they are let go.
  void Stop();
  void LetGo();
  void Join();
  // In a fork's child: the thread is the parent's, and so are the devices.
  void Abandon();

  // Calls `ask` with this thread's RDMA links between two passes over its lanes, and waits for what it gives or throws;
  // on the caller's own thread once this one has ended.
  template <class Ask>
  auto AskVerbs(Ask&& ask) {
    return Answer([&] { return ask(verbs_); });
  }
  std::atomic<bool>& has_events() { return has_events_; }
  // The same for TCP sockets that were made again.
  template <class Ask>
  auto AskResumed(Ask&& ask) {
    return Answer([&] { return ask(resumed_); });
  }

 private:
  template <class Change>
  void Tell(Change&& change);
  template <class Call>
  auto Answer(Call&& call) {
    using Result = decltype(call());
    if constexpr (std::is_void_v<Result>) {
      Do(call);
    } else {
      std::optional<Result> result;
      Do([&] { result.emplace(call()); });
      return std::move(*result);
    }
  }
  void Do(const std::function<void()>& what);
  void Run();
  bool MoveAny(const std::vector<ProxyLane*>& active);
  bool Listen(std::vector<ProxyLane*>& active);
  void LeaveLanes(int peer);
  void ServeLinks(bool at_once);
  void Sleep(const std::vector<ProxyLane*>& active, std::int64_t nap);

  bool oversubscribed_;
  Failed failed_;
  Told told_;
  int wake_;
  std::vector<pollfd> fds_;
  std::atomic<bool> has_events_{false};
  std::unique_ptr<VerbsHost> verbs_;
  std::int64_t serve_at_ = 0;
  Mending::Resumed resumed_;

  std::mutex late_;  // over `verbs_`, once the thread has ended
  std::mutex mutex_;
  std::vector<ProxyLane*> lanes_;
  std::vector<std::pair<ProxyLane*, ProxyPart>> inbox_;
  std::vector<std::packaged_task<void()>> tasks_;
  bool asleep_ = false;
  bool stop_ = false;
  bool let_go_ = false;
  bool over_ = false;
  std::atomic<bool> news_{false};
  std::thread thread_;
};

}  // namespace hetcoll
