// What no correct peer says, and fuzzing found (native/fuzz): an error, and nothing that was not to be touched is.
#include <functional>

#include "host/windows.h"
#include "shm_pair.h"
#include "transport/tcp.h"
#include "transport/tcp_block.h"
#include "transport/tcp_mending.h"
#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

constexpr std::uint64_t kIdentity = 5;

// The windows of rank 0, and what rank 1 says to them.
struct Asked {
  Asked() {
    for (const int channel : {kRequests, kAnswers}) {
      auto [ours, theirs] = SocketPairs(1);
      const auto link = [](int fd, int peer) {
        auto shared = std::make_shared<TcpShared>();
        return MakeTcp(MakeSockets({&fd, 1}, {peer, 0, 0}, shared), shared);
      };
      LinkEnds here = link(ours[0], 1);
      links.tx(1, channel).end = std::move(here.send);
      links.rx(1, channel).end = std::move(here.recv);
      there[static_cast<std::size_t>(channel)] = link(theirs[0], 0);
    }
    windows.Add(1, memory.data(), memory.size(), 1);
  }

  // A message of words of 64 bits.
  void Say(int channel, const std::vector<std::uint64_t>& words, std::size_t nbytes) {
    const auto c = static_cast<std::size_t>(channel);
    const hetcoll::Message m{.signature = kIdentity + numbers[c]++ * kNumberStep, .total = nbytes};
    const auto* data = reinterpret_cast<const std::byte*>(words.data());
    CHECK(there[c].send->Push(m, 0, data, nbytes) == static_cast<std::ptrdiff_t>(nbytes), "it was not sent");
  }
  // What is wrong with it, in our words.
  std::string Refusal() {
    try {
      for (int i = 0; i < 10; ++i) windows.Pass(links);
    } catch (const Fault& fault) {
      return fault.kind == FaultKind::kCorrupt && fault.peer == 1 ? fault.what() : "another kind";
    }
    return "nothing";
  }

  Bytes memory = Bytes(4096);
  hetcoll::Links links{2};
  Windows windows{0, 2, kIdentity};
  std::array<LinkEnds, 2> there;
  std::array<std::uint64_t, 2> numbers{};
};

constexpr std::uint64_t Both(std::uint32_t low, std::uint32_t high) { return low | std::uint64_t{high} << 32; }

}  // namespace

// A put that its owner's device is to read (Windows::Ask::kPull), where there is none; to a window, and to none.
void PulledWithoutADevice() {
  for (const std::uint32_t window : {1u, 7u}) {
    Asked asked;
    asked.Say(kRequests, {Both(window, 2), Both(0, 1), 0, 0}, 32);
    asked.Say(kRequests, {0, 0, 0}, 24);
    const std::string said = asked.Refusal();
    CHECK(said.find("no device") != std::string::npos, "%s", said.c_str());
  }
}

// An answer to what was not asked yet would end a call whose memory is still to be sent.
void AnsweredBeforeItIsAsked() {
  Asked asked;
  const Bytes source(std::size_t{4} << 20);  // more than a socket takes
  const auto put = asked.windows.Put(1, 1, source.data(), std::array{Piece{0, 0, source.size()}}, -1);
  asked.Say(kAnswers, {0}, 4);
  const std::string said = asked.Refusal();
  CHECK(said.find("before") != std::string::npos, "%s", said.c_str());
  CHECK(put->state == Pending::State::kRunning, "a call is over whose memory is still to be sent");
  asked.windows.Drop();
}

// Bytes that nobody keeps, since the peer's kernel has them and no checksum is over them.
void AskedForWhatIsGone() {
  auto shared = std::make_shared<TcpShared>(Integrity::kSampled);
  shared->mending = std::make_shared<Mending>();
  auto [ours, theirs] = SocketPairs(1);
  auto [again, other] = SocketPairs(1);
  const SocketId id{1, 0, 0};
  LinkEnds link = MakeTcp(MakeSockets(ours, id, shared), shared);
  const Bytes data(70'000);
  const hetcoll::Message m{.signature = 1, .total = data.size()};
  CHECK(link.send->Push(m, 0, data.data(), data.size()) == 70'000, "it was not sent");
  CHECK(shared->mending->Hold(id, 1, true).has_value(), "it is not held");
  Mending::Resumed resumed;
  const Came came{BlockHeader::kChecked + data.size(), 100, 50};
  CHECK(KindOf([&] { shared->mending->Resume(id, 1, again[0], came, resumed); }) == FaultKind::kCorrupt, "it goes on");
  for (const int fd : {theirs[0], other[0]}) close(fd);
}

// Another process may write to a line that this one has open: what was checked is what counts.
void WordsThatChange() {
  for (const ShmPlace place : {ShmPlace::kReturned, ShmPlace::kRecycledSlot}) {
    Pair p(64 << 10);
    const hetcoll::Message m{.signature = 3, .total = 64, .mutual = true};
    ShmLine& line = p.line(0, 0);
    line.signature = m.signature;
    line.nbytes = line.total = 64;
    line.place = static_cast<std::uint32_t>(place);
    line.where = {.offset = 0, .fragment = 0, .channel = 0};
    line.stamp.store(1);
    CHECK(p.b[0].recv->Peek(m, 0, 64).n == 64, "it is not open");
    line.where = {.offset = 250, .fragment = 5, .channel = 100};
    p.b[0].recv->Consume(64);
    const Bytes sent = Pattern(64, 1);
    CHECK(p.b[0].send->Push(m, 0, sent.data(), sent.size()) == 64, "it was not sent");
    CHECK(ReceiveAll(*p.a[0].recv, m) == sent, "other bytes came");
  }
}

// The frame that ends a rail's recovery, over a rail that was never lost.
void TakenUpThoughNotLost() {
  Job job({.size = 2, .over = Over::kVerbs});
  Settle(job);
  job.fabric().Change(0, [](FakeNic& nic) {
    nic.change = [](std::span<std::byte> bytes, std::uint32_t&) {
      if (bytes.size() < sizeof(::hetcoll::Frame)) return;
      std::memcpy(bytes.data() + offsetof(::hetcoll::Frame, flags), &kFrameProved, sizeof kFrameProved);
    };
  });
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 1000);
    Bytes buffer = Input(rank, 1000, DType::kFloat32);
    CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kFailed, "rank %d is content", rank);
    if (rank == 0) return;
    const Failure failure = e.failure();
    CHECK(failure.kind == FaultKind::kCorrupt && failure.peer == 0, "%s", failure.text.c_str());
    job.engine(0).Halt(FaultKind::kAborted, 1, "told");
  });
}

}  // namespace hetcoll::testing
