// Fragments that both ends copy: the receiver reads pieces in the sender's process, the sender writes others into the
// receiver's.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "harness.h"
#include "transport/shm/edge.h"
#include "transport/shm/private.h"

namespace hetcoll::testing {
namespace {

using Frame = struct hetcoll::Message;  // not the plan of that name

constexpr std::size_t kRest = (std::size_t{640} << 10) + 12345;
constexpr std::size_t kLarge = kPrivateFragment + kRest;  // two fragments
constexpr Frame kOneWay{1, kLarge, true, -1, Use::kStored};

void Clear(Bytes& bytes) { std::memset(bytes.data(), 0, bytes.size()); }

// Two ranks of one process, which know that they can read and write each other's memory.
struct Two {
  Two() : layout(2, std::size_t{2} << 20) {
    const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
    sender = std::make_shared<ShmSegment>(fd, layout, ShmOptions{SlotStores::kClaimed, PrivateReads::kAlways});
    receiver = sender->Share();
    close(fd);
    sender->Introduce(0);
    receiver->Introduce(1);
    from = MakeShm(*sender, 0, 1, 1);
    to = MakeShm(*receiver, 1, 0, 0);
    pieces = Edge(*sender, 0, 1, 0).pieces;
    Edge(*sender, 0, 1, 0).credit->reads = 1;
  }

  void Lend(const Frame& m, const Bytes& data) {
    for (std::size_t at = 0; at < data.size();) {
      const std::ptrdiff_t n = from[0].send->Push(m, at, data.data() + at, data.size() - at);
      CHECK(n > 0, "at %zu", at);
      if (n <= 0) return;
      at += static_cast<std::size_t>(n);
    }
  }

  std::size_t Pull(const Frame& m, Bytes& got, std::size_t at) {
    while (at < got.size()) {
      const std::ptrdiff_t n = to[0].recv->Pull(m, at, got.data() + at, got.size() - at, false);
      if (n == kWouldBlock) break;
      at += static_cast<std::size_t>(n);
    }
    return at;
  }

  ShmLayout layout;
  std::shared_ptr<ShmSegment> sender, receiver;
  std::array<LinkEnds, kChannels> from, to;
  ShmPieces* pieces = nullptr;
};

// Whoever comes takes the next piece; nobody gets one of a fragment that is not open.
void Pieces() {
  Two two;
  SharedCopy copy(*two.pieces);
  constexpr std::size_t kBytes = 3 * kMostPiece + 5;
  const Bytes data = Pattern(kBytes, 1);
  Bytes into(kBytes);
  Piece piece{};
  copy.Open(7, into.data());
  CHECK(copy.fragment() == 7 && !copy.Take(6, kBytes, piece) && !copy.Take(8, kBytes, piece), "7 is open");
  CHECK(copy.Take(7, kBytes, piece) && piece.at == 0 && piece.n == kMostPiece, "the first piece");
  CHECK(copy.Write(7, data.data(), kBytes, two.sender->owner(1), 1), "the others");
  CHECK(copy.written() == 3 && two.pieces->writing == 0, "%zu were written", std::size_t(copy.written()));
  CHECK(!copy.Take(7, kBytes, piece) && !copy.Write(7, data.data(), kBytes, two.sender->owner(1), 1), "none is left");
  CHECK(std::equal(into.begin() + kMostPiece, into.end(), data.begin() + kMostPiece), "the others arrive");
  CHECK(std::all_of(into.begin(), into.begin() + kMostPiece, [](std::byte b) { return b == std::byte{}; }), "not ours");

  for (const std::size_t nbytes : {2 * kLeastPiece, 100'001ul, 262'144ul, 2 * kMostPiece}) {
    CHECK(SharedCopy::Pieces(nbytes) == 2 && PieceBytes(nbytes) % 4096 == 0, "%zu bytes: a piece for each", nbytes);
  }
  CHECK(SharedCopy::Pieces(kPrivateFragment) == 4, "of long ones, no more than one would like to wait for");
}

// A receiver that waits for its sender's pieces, one that gets no help, and messages that are not shared.
void Helped() {
  Two two;
  const Bytes data = Pattern(kLarge, 2);
  Bytes got(kLarge);
  CHECK(!two.from[0].send->Help(), "nothing is lent");
  two.Lend(kOneWay, data);
  CHECK(!two.from[0].send->Help(), "nobody has invited it");
  CHECK(two.Pull(kOneWay, got, 0) == kLarge && Same(got, data), "without help");
  CHECK(two.pieces->written == 0 && !two.from[0].send->Help() && two.from[0].send->Lent() == 0, "it came too late");

  two.Lend(kOneWay, data);
  Clear(got);
  two.pieces->written = std::uint64_t(0) - 1;  // as if a piece of the sender's were on its way
  CHECK(two.Pull(kOneWay, got, 0) == 0, "it is waited for");
  CHECK(two.from[0].send->Lent() == kLarge, "all is lent still");
  two.pieces->written = 0;
  CHECK(two.Pull(kOneWay, got, 0) == kLarge && Same(got, data), "and then goes on");

  const Frame exchanged{2, kLarge, true, -1, Use::kExchanged};  // both ends are busy
  two.Lend(exchanged, data);
  const std::ptrdiff_t n = two.to[0].recv->Pull(exchanged, 0, got.data(), kLarge, false);
  CHECK(n > 0 && two.from[0].send->Lent() == kLarge - std::size_t(n) && !two.from[0].send->Help(), "not shared");
  CHECK(two.pieces->next >> 8 == 4, "nor was its sender invited");
  CHECK(two.Pull(exchanged, got, std::size_t(n)) == kLarge && Same(got, data), "the rest");
}

// Both ends at once, as threads.
void Together() {
  Two two;
  constexpr int kMessages = 20;
  std::vector<Bytes> data;
  for (unsigned i = 0; i < 3; ++i) data.push_back(Pattern(kLarge, i));
  std::atomic<bool> ended{false};
  std::thread sender([&] {
    for (std::size_t i = 0; i < kMessages && !ended; ++i) {
      two.Lend(kOneWay, data[i % data.size()]);
      while (two.from[0].send->Lent() > 0 && !ended) two.from[0].send->Help();
    }
  });
  Bytes got(kLarge);
  const std::int64_t start = NowNs();
  for (std::size_t i = 0; i < kMessages && !ended; ++i) {
    Clear(got);
    for (std::size_t at = 0; at < kLarge && !ended; ended = NowNs() - start > 60'000'000'000) {
      at = two.Pull(kOneWay, got, at);
    }
    CHECK(Same(got, data[i % data.size()]), "message %zu", i);
  }
  ended = true;
  sender.join();
  CHECK(two.pieces->writing == 0, "nobody writes");
}

// Nothing is written to who has withdrawn; who withdraws waits for who writes, but not for the dead.
void Withdrawn() {
  Two two;
  SharedCopy copy(*two.pieces);
  const Bytes data = Pattern(kLeastPiece, 3);
  Bytes into(kLeastPiece);
  copy.Open(1, into.data());
  two.sender->owner(1).withdrawn = 1;
  CHECK(!copy.Write(1, data.data(), kLeastPiece, two.sender->owner(1), 1) && copy.written() == 0, "withdrawn");

  CopyingSenders& copying_senders = two.receiver->copying_senders();
  copying_senders.Settle();  // nobody was invited
  copying_senders.Add(*two.pieces, two.sender->owner(0));
  copying_senders.Settle();  // nobody writes
  two.pieces->writing = 1;
  std::atomic<bool> over{false};
  std::thread writer([&] {
    usleep(50'000);
    over = true;
    two.pieces->writing = 0;
  });
  copying_senders.Settle();
  CHECK(over, "it waits");
  writer.join();

  const pid_t child = fork();
  if (child == 0) {
    two.sender->Introduce(0);
    two.pieces->writing = 1;
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
  const std::int64_t start = NowNs();
  copying_senders.Settle();
  CHECK(NowNs() - start < 500'000'000, "the dead write nothing");
}

// Memory that only its own process can reach: pieces that cannot be written come back, and it is not lent.
void OutOfReach() {
  constexpr long kMemfdSecret = 447;
  const int fd = static_cast<int>(syscall(kMemfdSecret, O_CLOEXEC));
  if (fd < 0) return;  // not in this kernel
  void* at = ftruncate(fd, kLarge) == 0 ? mmap(nullptr, kLarge, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  CHECK(at != MAP_FAILED, "%zu bytes", kLarge);
  if (at == MAP_FAILED) return;
  auto* secret = static_cast<std::byte*>(at);
  Two two;
  Bytes data = Pattern(kLarge, 4);
  two.Lend(kOneWay, data);
  SharedCopy copy(*two.pieces);
  copy.Open(1, secret);
  Piece piece{};
  CHECK(copy.Take(1, kPrivateFragment, piece) && two.from[0].send->Help(), "it helps once");
  CHECK(copy.written() == 0 && copy.TakeBack(kPrivateFragment, piece) && piece.at == kMostPiece, "and gives back");
  CHECK(!copy.TakeBack(kPrivateFragment, piece) && !two.from[0].send->Help(), "no more");

  OwnPages pages;
  CHECK(!pages.Readable(secret, kLarge) && pages.Readable(data.data(), kLarge), "who can read it");
  for (int i = 0; i < 20; ++i) CHECK(pages.Readable(data.data() + i, kLarge - 20), "at %d", i);
  munmap(at, kLarge);
}

}  // namespace

void SharedCopies() {
  Pieces();
  Helped();
  Together();
  Withdrawn();
  OutOfReach();
}

}  // namespace hetcoll::testing
