// TCP sockets that are reset and made again: what is kept for that, and that nothing is lost or comes twice.

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

#include "mender.h"
#include "transport/tcp_sent.h"

namespace hetcoll::testing {
namespace {

// Bytes [from, to) of the stream, put together of what lies side by side.
Bytes Read(const SentBytes& sent, std::uint64_t from) {
  Bytes out;
  while (from < sent.total()) {
    const auto part = sent.From(from);
    if (part.empty()) break;
    out.insert(out.end(), part.begin(), part.end());
    from += part.size();
  }
  return out;
}

}  // namespace

// Against a model that keeps everything. What is checked is kept; what is not may be dropped.
void SentStreams() {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    SentBytes sent;
    Bytes all, dropped;  // of each byte: whether it may be gone
    std::uint64_t acked = 0;
    std::vector<std::unique_ptr<Bytes>> lent;
    const auto fresh = [&](std::size_t n) {
      lent.push_back(std::make_unique<Bytes>(Pattern(n, random())));
      return lent.back().get();
    };
    for (int step = 0; step < 300; ++step) {
      const std::size_t n = 1 + random() % (step % 7 == 0 ? 70000 : 300);
      Bytes& data = *fresh(n);
      bool checked = true;
      switch (random() % 6) {
        case 0: {
          if (sent.Place(n) == nullptr) sent.MakeRoom(n);
          std::memcpy(sent.Place(n), data.data(), n);
          const std::size_t took = random() % (n + 1);
          if (took > 0) sent.Took(took);
          all.insert(all.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(took));
          break;
        }
        case 1:
          sent.Copy(data.data(), 1);  // its header
          all.push_back(data[0]);
          dropped.push_back(std::byte{0});
          checked = random() % 2 == 0;
          for (std::size_t at = 0; at < n;) {  // in parts, as a socket takes them
            const std::size_t part = std::min<std::size_t>(n - at, 1 + random() % 20000);
            sent.Lend(data.data() + at, part, checked);
            at += part;
          }
          all.insert(all.end(), data.begin(), data.end());
          break;
        case 2:
          sent.Copy(data.data(), n);
          all.insert(all.end(), data.begin(), data.end());
          break;
        case 3:
          sent.Keep();
          CHECK(!sent.lends(), "seed %u: kept", seed);
          for (const auto& bytes : lent) std::fill(bytes->begin(), bytes->end(), std::byte{0xee});
          lent.clear();
          for (std::size_t i = sent.base(); i < dropped.size(); ++i)
            dropped[i] &= std::byte{2};  // what is there is kept
          break;
        case 4:
          acked = std::max(acked, sent.base() + random() % (sent.total() - sent.base() + 1));
          sent.Drop(acked);
          for (std::size_t i = sent.base(); i < acked; ++i) {
            if (dropped[i] != std::byte{0}) dropped[i] = std::byte{2};
          }
          break;
        default:
          sent.Forget(sent.base() + random() % (sent.total() - sent.base() + 1));
      }
      CHECK(sent.total() == all.size(), "seed %u: %zu of %zu", seed, std::size_t{sent.total()}, all.size());
      dropped.resize(all.size(), checked ? std::byte{0} : std::byte{1});
      const std::uint64_t from = sent.base() + random() % (sent.total() - sent.base() + 1);
      const void* gone = from < all.size() ? std::memchr(dropped.data() + from, 2, all.size() - from) : nullptr;
      const auto to = gone == nullptr
                          ? std::uint64_t{all.size()}
                          : static_cast<std::uint64_t>(static_cast<const std::byte*>(gone) - dropped.data());
      CHECK(sent.Holds(from, to) && (to == all.size() || !sent.Holds(from, to + 1)), "seed %u: holds", seed);
      const Bytes want(all.begin() + static_cast<std::ptrdiff_t>(from), all.begin() + static_cast<std::ptrdiff_t>(to));
      CHECK(Read(sent, from) == want, "seed %u, step %d: from %zu", seed, step, std::size_t{from});
    }
  }
}

// What the kernel says and does, on which all of it rests.
void AcknowledgedBytes() {
  if (!MayReset()) return;
  for (const bool sender : {false, true}) {
    const auto [a, b] = TcpPair();
    Bytes data(64 << 10, std::byte{7});
    std::size_t sent = 0;
    for (ssize_t n = 1; n > 0; sent += static_cast<std::size_t>(std::max<ssize_t>(n, 0))) {
      n = send(a, data.data(), data.size(), MSG_DONTWAIT);
    }
    SleepMs(20);
    int before = 0, after = 0;
    ioctl(a, SIOCOUTQ, &before);
    ResetConnection(sender ? a : b);
    SleepMs(20);
    ioctl(a, SIOCOUTQ, &after);
    CHECK(before > 0 && after == before, "a broken socket said %d, then %d", before, after);
    std::size_t came = 0;
    ssize_t n = 1;
    while (n > 0) {
      n = recv(b, data.data(), data.size(), MSG_DONTWAIT);
      came += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    }
    CHECK(n < 0 && (errno == ECONNRESET || errno == ECONNABORTED), "the end: %zd, %s", n, std::strerror(errno));
    CHECK(came >= sent - static_cast<std::size_t>(after), "%zu came, %zu acknowledged", came,
          sent - static_cast<std::size_t>(after));
    close(a);
    close(b);
  }
}

// Every byte position, headers too: the bytes until a reset are drawn anew each time.
void ResetSockets() {
  if (!MayReset()) return;
  struct Kind {
    const char* fault;
    std::vector<std::size_t> counts;  // the more, the rarer resets are
  };
  const Kind kinds[] = {{"reset=23", {0, 1, 30}},
                        {"reset=700", {1, 500, 4001}},
                        {"reset=40000", {1, 500, 40001}},
                        {"reset=150000", {1, 500, 40001}},
                        {"reset=9000,short=0.3,delay=0.02", {1, 500, 20011}}};
  unsigned seed = 1;
  std::uint64_t made = 0;
  for (const Integrity integrity : {Integrity::kOff, Integrity::kSampled, Integrity::kAll}) {
    for (const int stripes : {1, 3}) {
      for (const auto& [reset, counts] : kinds) {
        const std::string fault = std::string(reset) + ",seed=" + std::to_string(++seed);
        Job job({.size = 3,
                 .over = Over::kTcp,
                 .stripes = stripes,
                 .fault = fault,
                 .integrity = integrity,
                 .loopback = true});
        Mender mender(job, seed % 2 == 0 ? 0 : 4, seed);
        for (const std::size_t count : counts) {
          Allreduce(job, RingAllreduce, DType::kFloat32, count, fault.c_str());
          Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault.c_str());
          Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault.c_str());
        }
        for (int r = 0; r < 3; ++r) made += job.engine(r).reconnects();
      }
    }
  }
  CHECK(made > 500, "only %zu sockets were made again", std::size_t{made});
}

// A sender that has returned, writes over its memory and calls nothing more: what it sent comes all the same.
void ResetAfterTheCall() {
  if (!MayReset()) return;
  for (const std::size_t nbytes : {std::size_t{100}, std::size_t{4000}, std::size_t{300000}, std::size_t{1500000}}) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      const std::string fault = "rank=0,reset=" + std::to_string(nbytes / 2 + 1) + ",seed=" + std::to_string(seed);
      Job job({.size = 2, .over = Over::kTcp, .fault = fault, .loopback = true});
      Mender mender(job, 3, seed);
      std::atomic<bool> sent{false};
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, nbytes);
        for (int round = 0; round < 3; ++round) {
          Bytes data(nbytes, static_cast<std::byte>(round + 1));
          if (rank == 0) {
            CHECK(RunToEnd(e, shape, data.data(), nullptr) == Outcome::kDone, "%s", e.failure().text.c_str());
            std::fill(data.begin(), data.end(), std::byte{0xee});
          } else {
            Bytes came(nbytes);
            CHECK(RunToEnd(e, shape, nullptr, came.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
            CHECK(came == data, "%zu bytes, seed %u, round %d", nbytes, seed, round);
          }
        }
      });
    }
  }
}

// Without anybody who mends, and with one who gives up, it is the error that it ever was.
void ResetForGood() {
  if (!MayReset()) return;
  for (const bool mended : {false, true}) {
    Job job({.size = 2, .over = Over::kTcp, .fault = "reset=5000,rank=1", .loopback = mended, .sockets = true});
    std::atomic<bool> over{false};
    std::thread gives_up([&] {
      while (!over) {
        for (int r = 0; r < 2; ++r) {
          for (const LostSocket& l : job.engine(r).TakeLost()) job.engine(r).GiveUpSocket(l.id, "nobody is there");
        }
        Nap();
      }
    });
    EndsForGood(job, mended ? "nobody is there" : "");
    over = true;
    gives_up.join();
  }
}

// A peer that lacks what was acknowledged: never wrong data.
void LyingAcknowledgements() {
  if (!MayReset()) return;
  Job job({.size = 2, .over = Over::kTcp, .loopback = true});
  Allreduce(job, RingAllreduce, DType::kFloat32, 30000, "before");
  const SocketId id{1, 0, 0};
  CHECK(job.engine(0).HoldSocket(id, 1, false).has_value(), "held");
  CHECK(!job.engine(0).HoldSocket(id, 1, false).has_value(), "the same try again");
  CHECK(job.engine(0).HoldSocket(id, 1, true).has_value(), "the same try by the lower rank");
  CHECK(!job.engine(0).HoldSocket(id, 0, true).has_value(), "an earlier try");
  CHECK(!job.engine(0).HoldSocket({1, 0, 5}, 7, true).has_value(), "no such socket");
  CHECK(!job.engine(0).HoldSocket({1, 9, 0}, 7, true).has_value(), "no such link");
  const auto [mine, theirs] = TcpPair();
  CHECK(!job.engine(0).ResumeSocket(id, 2, mine, {}), "a try that was not held");
  CHECK(job.engine(0).ResumeSocket(id, 1, mine, {std::uint64_t{1} << 40, 0, 0}), "more than was ever sent");
  CHECK(job.engine(0).failure().kind == FaultKind::kCorrupt, "%s", job.engine(0).failure().text.c_str());
  close(theirs);
}

}  // namespace hetcoll::testing
