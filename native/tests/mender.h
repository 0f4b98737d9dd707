// Makes the TCP sockets of a job's engines again, as src/hetcoll/links/mending.py does between processes.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

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

class Mender {
 public:
  // `breaks`: of the connections that it makes, one of so many is reset before both ends have it.
  Mender(Job& job, unsigned breaks, unsigned seed) : job_(job), breaks_(breaks), random_(seed) {
    thread_ = std::thread([this] { Loop(); });
  }
  ~Mender() {
    stop_ = true;
    thread_.join();
  }
  Mender(const Mender&) = delete;
  Mender& operator=(const Mender&) = delete;

 private:
  struct Lost {
    int rank;
    SocketId id;
    std::uint32_t tries;
    std::int64_t due;
  };

  void Loop() {
    std::vector<Lost> lost;
    while (!stop_) {
      for (int r = 0; r < job_.size(); ++r) {
        for (const LostSocket& l : job_.engine(r).TakeLost())
          lost.push_back({r, l.id, l.tries, l.held ? DeadlineNs(0.05) : 0});
      }
      std::erase_if(lost, [&](Lost& l) { return !job_.engine(l.rank).IsLost(l.id) || Make(l); });
      Nap();
    }
  }

  // Whether there is no more to do.
  bool Make(Lost& l) {
    Engine &ours = job_.engine(l.rank), &theirs = job_.engine(l.id.peer);
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
    if (job_.tls()) Encrypt(mine, other);
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

  Job& job_;
  unsigned breaks_;
  std::mt19937 random_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace hetcoll::testing
