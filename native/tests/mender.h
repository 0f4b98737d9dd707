// Makes the TCP sockets of engines, or proxies, again, as src/hetcoll/links/mending.py does between processes.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <random>

#include "harness.h"

namespace hetcoll::testing {

// Whether this process may reset connections: see ResetConnection.
inline bool MayReset() {
  const auto [mine, theirs] = TcpPair();
  bool may = true;
  try {
    ResetConnection(mine);
  } catch (const Fault&) {
    may = false;
  }
  close(mine);
  close(theirs);
  return may;
}

// With a reset: the end of the stream would say that this rank ends it.
inline void CloseHard(int fd) {
  const linger none{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  close(fd);
}

// Resets every connection over TCP of this process, which are those of its ranks to each other.
inline void ResetAll() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    sockaddr_storage there{};
    socklen_t length = sizeof there;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &length) != 0 || there.ss_family != AF_INET) continue;
    try {
      ResetConnection(fd);
    } catch (const Fault&) {  // its owner has closed it meanwhile
    }
  }
}

// An all-reduce ends with an error on both ranks, each of which names the other and holds `text`.
inline void EndsForGood(Job& job, const std::string& text) {
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 50000);
    Bytes in = Input(rank, 50000, DType::kFloat32), out(in.size());
    CHECK(RunToEnd(e, shape, in.data(), out.data()) == Outcome::kFailed, "it goes on");
    const Failure f = e.failure();
    CHECK(f.kind == FaultKind::kPeerGone && f.peer == 1 - rank, "%d: %s", int(f.kind), f.text.c_str());
    CHECK(f.text.find(text) != std::string::npos, "%s", f.text.c_str());
  });
}

template <class Owner>
class Mender {
 public:
  // `breaks`: of the connections that it makes, one of so many is reset before both ends have it.
  Mender(std::vector<Owner*> owners, bool tls, unsigned breaks, unsigned seed)
      : owners_(std::move(owners)), tls_(tls), breaks_(breaks), random_(seed) {
    thread_ = std::thread([this] { Loop(); });
  }
  Mender(Job& job, unsigned breaks, unsigned seed) : Mender(Engines(job), job.tls(), breaks, seed) {}
  ~Mender() {
    stop_ = true;
    thread_.join();
  }
  Mender(const Mender&) = delete;
  Mender& operator=(const Mender&) = delete;

 private:
  static std::vector<Engine*> Engines(Job& job) {
    std::vector<Engine*> engines;
    for (int r = 0; r < job.size(); ++r) engines.push_back(&job.engine(r));
    return engines;
  }

  struct Lost {
    int rank;
    SocketId id;
    std::uint32_t tries;
    std::int64_t due;
  };

  void Loop() {
    std::vector<Lost> lost;
    while (!stop_) {
      for (int r = 0; r < static_cast<int>(owners_.size()); ++r) {
        for (const LostSocket& l : At(r).TakeLost()) {
          lost.push_back({r, l.id, l.tries, l.held ? DeadlineNs(0.05) : 0});
        }
      }
      std::erase_if(lost, [&](Lost& l) { return !At(l.rank).IsLost(l.id) || Make(l); });
      Nap();
    }
  }

  // Whether there is no more to do.
  bool Make(Lost& l) {
    Owner &ours = At(l.rank), &theirs = At(l.id.peer);
    SocketId there = l.id;
    there.peer = l.rank;
    if (NowNs() < l.due) return false;
    ++l.tries;
    const auto came = ours.HoldSocket(l.id, l.tries, false);
    if (!came) return false;
    if (breaks_ > 0 && random_() % breaks_ == 0) return false;  // nobody is reached this time
    const auto answer = theirs.HoldSocket(there, l.tries, l.rank < l.id.peer);
    if (!answer) return false;
    const auto [mine, other] = TcpPair();
    if (tls_) Encrypt(mine, other);
    if (breaks_ > 0 && random_() % breaks_ == 0) {  // the other end gives it up
      if (!ours.ResumeSocket(l.id, l.tries, mine, *answer)) CloseHard(mine);
      ResetConnection(other);
      close(other);
      return false;
    }
    if (breaks_ > 0 && random_() % breaks_ == 0) ResetConnection(mine);
    const bool taken = ours.ResumeSocket(l.id, l.tries, mine, *answer);
    if (!taken) CloseHard(mine);
    if (!theirs.ResumeSocket(there, l.tries, other, *came)) CloseHard(other);
    return taken;
  }

  Owner& At(int rank) { return *owners_[static_cast<std::size_t>(rank)]; }

  std::vector<Owner*> owners_;  // by rank
  bool tls_;
  unsigned breaks_;
  std::mt19937 random_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};
Mender(Job&, unsigned, unsigned) -> Mender<Engine>;

}  // namespace hetcoll::testing
