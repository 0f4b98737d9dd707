// Connections that are encrypted: streams by themselves, then links of an engine.
#include "transport/tls.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <cerrno>
#include <random>

#include "harness.h"
#include "mender.h"

namespace hetcoll::testing {
namespace {

constexpr TlsKey kKey{std::byte{7}};

ssize_t SendOne(Tls& tls, const Bytes& data) {
  const iovec piece{const_cast<std::byte*>(data.data()), data.size()};
  return tls.Send({&piece, 1});
}

// Two ends of a connection, and what the kernel carries between them.
struct Ends {
  explicit Ends(const TlsKey& key = kKey, bool ahead = true, std::uint64_t rekey = Tls::kRecords) {
    std::tie(fds[0], fds[1]) = TcpPair();
    const int on = 1;
    for (const int fd : fds) {
      fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    tls[0] = std::make_unique<Tls>(fds[0], kKey, false, ahead, rekey);
    tls[1] = std::make_unique<Tls>(fds[1], key, true, ahead, rekey);
  }
  ~Ends() {
    for (const int fd : fds) close(fd);
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  // The client sends a byte, which the server takes.
  void ShakeHands() const {
    std::byte came;
    for (bool shook[2] = {}; !shook[0] || !shook[1];) {
      if (!shook[0]) shook[0] = SendOne(*tls[0], {std::byte{1}}) == 1;
      if (!shook[1]) shook[1] = tls[1]->Receive(&came, 1) == 1;
    }
  }

  int fds[2];
  std::unique_ptr<Tls> tls[2];
};

}  // namespace

// Both directions at once, in pieces of any size, through buffers that are often full, with new keys now and then.
void EncryptedStreams() {
  for (const bool ahead : {false, true}) {
    Ends ends(kKey, ahead, ahead ? 7 : Tls::kRecords);
    for (const int fd : ends.fds) {
      const int small = 20000;
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    }
    std::mt19937 random(3);
    constexpr std::size_t kTotal = 3 << 20;
    Bytes sent[2], came[2];
    std::size_t at[2] = {};
    for (Bytes& bytes : sent) {
      for (std::size_t i = 0; i < kTotal; ++i) bytes.push_back(static_cast<std::byte>(random()));
    }
    int blocked = 0;
    while (came[0].size() < kTotal || came[1].size() < kTotal) {
      for (const int end : {0, 1}) {
        const std::size_t most = std::min(kTotal - at[end], std::size_t{1} << random() % 18);
        const std::size_t first = most / 3;
        const iovec pieces[2] = {{sent[end].data() + at[end], first},
                                 {sent[end].data() + at[end] + first, most - first}};
        const ssize_t n = ends.tls[end]->Send(pieces);
        blocked += n < 0;
        CHECK(n >= 0 || errno == EAGAIN, "%s", std::strerror(errno));
        if (n > 0) at[end] += static_cast<std::size_t>(n);
        CHECK(n <= static_cast<ssize_t>(most), "%zd of %zu", n, most);
        Bytes part(1 + random() % 40000);
        const ssize_t got = ends.tls[end]->Receive(part.data(), part.size());
        CHECK(got > 0 || errno == EAGAIN, "%zd, %s", got, std::strerror(errno));
        if (got > 0) came[end].insert(came[end].end(), part.begin(), part.begin() + got);
      }
    }
    CHECK(came[0] == sent[1] && came[1] == sent[0], "other bytes");
    CHECK(blocked > 0, "the buffers were never full");
    shutdown(ends.fds[0], SHUT_WR);
    std::byte byte;
    CHECK(ends.tls[1]->Receive(&byte, 1) == 0, "the end, %s", std::strerror(errno));
  }
}

// Who has another key learns nothing, says nothing, and both ends know why.
void WrongKeys() {
  Ends ends(TlsKey{std::byte{8}});
  const Bytes word(100, std::byte{1});
  int errors[2] = {};
  for (const std::int64_t start = NowNs(); (errors[0] == 0 || errors[1] == 0) && Seconds(start) < 20;) {
    for (const int end : {0, 1}) {
      Bytes into(100);
      const ssize_t n = end == 0 ? SendOne(*ends.tls[0], word) : ends.tls[1]->Receive(into.data(), into.size());
      CHECK(n <= 0, "%zd bytes went", n);
      if (n == 0) errors[end] = EPIPE;
      if (n < 0 && errno != EAGAIN) errors[end] = errno;
    }
  }
  CHECK(errors[1] == EKEYREJECTED, "the server: %s", std::strerror(errors[1]));
  CHECK(errors[0] == EKEYREJECTED, "the client: %s", std::strerror(errors[0]));
}

// What is on the wire is not what was sent; a bit that changes there is found.
void ChangedRecords() {
  Ends ends(kKey, false);
  const Bytes sent(3000, std::byte{'a'});
  Bytes came(sent.size());
  ends.ShakeHands();
  CHECK(SendOne(*ends.tls[0], sent) == 3000, "%s", std::strerror(errno));
  Bytes wire(10000);
  const ssize_t there = recv(ends.fds[1], wire.data(), wire.size(), MSG_PEEK | MSG_DONTWAIT);
  CHECK(there > 3000, "%zd bytes", there);
  CHECK(std::search(wire.begin(), wire.end(), sent.begin(), sent.begin() + 8) == wire.end(), "it can be read");
  CHECK(ends.tls[1]->Receive(came.data(), came.size()) == 3000 && came == sent, "%s", std::strerror(errno));

  ends.tls[0]->SpoilNext();
  CHECK(SendOne(*ends.tls[0], sent) == 3000, "%s", std::strerror(errno));
  std::fill(came.begin(), came.end(), std::byte{0});
  ssize_t got = -1;
  errno = EAGAIN;
  while (got < 0 && errno == EAGAIN) got = ends.tls[1]->Receive(came.data(), came.size());
  CHECK(got == -1 && errno == EBADMSG, "%zd, %s", got, std::strerror(errno));
  CHECK(came == Bytes(3000), "changed bytes were shown");
}

// A reset that a receive heard of as it looked for the rest of a record, behind what had come, is one to sends as well.
void EncryptedUntilReset() {
  Ends ends;
  const Bytes sent(3000, std::byte{5});
  Bytes came(5000);
  ends.ShakeHands();
  CHECK(SendOne(*ends.tls[0], sent) == 3000, "%s", std::strerror(errno));
  CHECK(send(ends.fds[0], "\x17\x03\x03", 3, 0) == 3, "%s", std::strerror(errno));  // how a record begins
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  CHECK(connect(ends.fds[0], &nobody, sizeof nobody) == 0, "%s", std::strerror(errno));
  pollfd broken{ends.fds[1], 0, 0};
  CHECK(poll(&broken, 1, 20000) == 1, "it is not reset");
  CHECK(ends.tls[1]->Receive(came.data(), came.size()) == 3000, "%s", std::strerror(errno));
  CHECK(SendOne(*ends.tls[1], sent) == -1 && errno == ECONNRESET, "a send: %s", std::strerror(errno));
  CHECK(ends.tls[1]->Receive(came.data(), 1) == -1 && errno == ECONNRESET, "a receive: %s", std::strerror(errno));
}

// Who found nothing to take may sleep until the socket is readable: nothing that came before is left behind it.
void EncryptedAndAsleep() {
  for (const std::size_t nbytes : {std::size_t{100}, std::size_t{24008}, std::size_t{50000}}) {
    Ends ends;
    ends.ShakeHands();
    for (const int end : {0, 1}) Tls::Hand(ends.fds[end], std::shared_ptr<Tls>(std::move(ends.tls[end])));
    const auto link = [&](int end) {
      auto shared = std::make_shared<TcpShared>(Integrity::kOff);
      const int fd = fcntl(ends.fds[end], F_DUPFD_CLOEXEC, 0);
      return MakeTcp(MakeSockets({&fd, 1}, {1 - end, 0, 0}, shared), shared);
    };
    LinkEnds from = link(0), to = link(1);
    const hetcoll::Message m{.signature = 7, .total = nbytes};
    Bytes sent(nbytes, std::byte{5}), came(nbytes);
    std::size_t there = 0;
    const auto push = [&] {
      const std::ptrdiff_t n = from.send->Push(m, there, sent.data() + there, nbytes - there);
      if (n > 0) there += static_cast<std::size_t>(n);
    };
    std::size_t taken = 0;
    for (const std::int64_t start = NowNs(); taken < nbytes && Seconds(start) < 20;) {
      if (there < nbytes) push();
      std::vector<pollfd> fds;
      to.recv->AddPoll(fds);
      if (poll(fds.data(), fds.size(), there < nbytes ? 0 : 1000) == 0) continue;
      const std::ptrdiff_t n = to.recv->Pull(m, taken, came.data() + taken, nbytes - taken, false);
      if (n > 0) taken += static_cast<std::size_t>(n);
    }
    CHECK(came == sent, "%zu of %zu bytes were taken", taken, nbytes);
  }
}

// As ever, whatever the network does: nothing of the engine knows of it.
void EncryptedLinks() {
  for (const int stripes : {1, 3}) {
    for (const Integrity integrity : {Integrity::kOff, Integrity::kAll}) {
      for (const char* fault : {"", "short=0.5,seed=5", "delay=0.1,short=0.5,reorder=0.2,seed=3"}) {
        Job job(
            {.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity, .tls = true});
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3001}, std::size_t{300007}}) {
          Allreduce(job, RingAllreduce, DType::kFloat32, count, fault);
          Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault);
          Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault);
        }
      }
    }
  }
}

// Connections that are reset: nothing is lost.
void EncryptedAndReset() {
  if (!MayReset()) return;
  std::uint64_t made = 0;
  unsigned seed = 0;
  struct Kind {
    const char* fault;
    std::size_t count;
  };
  for (const Integrity integrity : {Integrity::kOff, Integrity::kAll}) {
    for (const Kind kind : {Kind{"reset=700", 3001}, Kind{"reset=40000", 40001}, Kind{"reset=150000,short=0.3", 100003},
                            Kind{"corrupt=5000,corrupt_every=400000,rank=1", 300007}}) {
      // Records that are changed on the way reset a connection, too, and come again where all is kept for that.
      if (kind.fault[0] == 'c' && integrity != Integrity::kAll) continue;
      const std::string fault = std::string(kind.fault) + ",seed=" + std::to_string(++seed);
      Job job({.size = 3,
               .over = Over::kTcp,
               .stripes = seed % 2 == 0 ? 1 : 3,
               .fault = fault,
               .integrity = integrity,
               .loopback = true,
               .tls = true});
      Mender mender(job, seed % 3 == 0 ? 0 : 4, seed);
      for (const std::size_t count : {std::size_t{1}, kind.count}) {
        Allreduce(job, RingAllreduce, DType::kFloat32, count, fault.c_str());
        Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault.c_str());
        Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault.c_str());
      }
      std::uint64_t now = 0;
      for (int r = 0; r < 3; ++r) now += job.engine(r).reconnects();
      CHECK(now > 0, "%s: no socket was made again", fault.c_str());
      made += now;
    }
  }
  CHECK(made > 50, "only %zu sockets were made again", std::size_t{made});
}

// Else it is an error that names the edge, before anything wrong is used.
void ChangedLinks() {
  Job job({.size = 2, .over = Over::kTcp, .fault = "corrupt=5000,rank=1", .loopback = true, .tls = true});
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 40001);
    Bytes buffer = Input(rank, 40001, DType::kFloat32);
    CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kFailed, "rank %d is content", rank);
    if (rank == 1) return;
    const Failure failure = e.failure();
    CHECK(failure.kind == FaultKind::kCorrupt && failure.peer == 1, "%s", failure.text.c_str());
    CHECK(failure.text.find("changed on the way") != std::string::npos, "%s", failure.text.c_str());
    job.engine(1).Halt(FaultKind::kAborted, 0, "told");
  });
}

}  // namespace hetcoll::testing
