// Bytes that are spoiled on the way: the checksum itself, and what links make of it.

#include <numeric>
#include <random>

#include "base/crc32c.h"
#include "mender.h"
#include "transport/tcp_block.h"

namespace hetcoll::testing {

// Published values, and the ways to compute it against each other.
void Checksums() {
  const char digits[] = "123456789";
  unsigned char up[32], down[32];
  std::iota(up, up + 32, static_cast<unsigned char>(0));
  std::reverse_copy(up, up + 32, down);
  const Bytes zeros(32), ones(32, std::byte{0xff});
  const crc32c::Function hardware = crc32c::Hardware();
#if defined(__x86_64__)
  CHECK((hardware != nullptr) == (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")), "hardware");
#endif
  for (const crc32c::Function crc : {crc32c::Function(crc32c::Table), hardware, crc32c::Function(Crc32c)}) {
    if (crc == nullptr) continue;
    CHECK(crc(0, digits, 9) == 0xe3069283, "the check value");
    CHECK(crc(0, digits, 0) == 0, "nothing");
    CHECK(crc(0, zeros.data(), 32) == 0x8a9136aa, "RFC 3720: zeros");
    CHECK(crc(0, ones.data(), 32) == 0x62a8ab43, "RFC 3720: ones");
    CHECK(crc(0, up, 32) == 0x46dd794e, "RFC 3720: up");
    CHECK(crc(0, down, 32) == 0x113fdb5c, "RFC 3720: down");
  }
  std::mt19937 random(3);
  Bytes bytes(20000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (int i = 0; i < 500; ++i) {
    const std::size_t from = random() % 64, n = random() % (i % 2 ? 100 : bytes.size() - 64), cut = random() % (n + 1);
    const std::uint32_t whole = crc32c::Table(7, bytes.data() + from, n);
    CHECK(Crc32c(7, bytes.data() + from, n) == whole, "%zu bytes from %zu", n, from);
    const std::uint32_t begun = Crc32c(7, bytes.data() + from, cut);
    CHECK(Crc32c(begun, bytes.data() + from + cut, n - cut) == whole, "%zu bytes in two parts", n);
  }
}

namespace {

constexpr std::size_t kCount = 100'003;  // float32: messages of several checked pieces
// Of a header, which has 48, of the piece behind it, of its checksum, which has 16, of the next header, and so on.
constexpr int kBytes[] = {1, 8, 20, 33, 41, 48, 49, 1000, 65584, 65585, 65593, 65600, 65601, 65640, 200000};
// Of the first message, of 40 or 44 bytes, which is checked, and of headers behind it.
constexpr int kSmallBytes[] = {1, 33, 48, 49, 60, 88, 93, 104, 110, 150, 230};

// All-reduces of 3 ranks, `big` and small, until one fails. How many ranks saw an error, each of which names the edge.
int Spoiled(const std::string& fault, Integrity integrity, int stripes, std::size_t count) {
  Job job({.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity});
  std::atomic<int> seen{0};
  std::atomic<bool> over{false};
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kFloat32, count);
    for (int i = 0; i < 3; ++i) {
      Bytes buffer = Input(rank, count, DType::kFloat32);
      if (RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone) {
        CHECK(buffer == Sum(3, count, DType::kFloat32), "%s: wrong data on rank %d", fault.c_str(), rank);
        continue;
      }
      ++seen;
      if (!over.exchange(true)) {  // what the control plane does: the others hear of it
        const Failure failure = e.failure();
        CHECK(failure.kind == FaultKind::kCorrupt, "%s: %s", fault.c_str(), failure.text.c_str());
        CHECK(failure.peer == 1, "%s: rank %d is blamed", fault.c_str(), failure.peer);
        CHECK(failure.text.find("spoiled") != std::string::npos, "%s", failure.text.c_str());
        CHECK(e.integrity().spoiled.get() == 1, "%s: %llu are counted", fault.c_str(),
              static_cast<unsigned long long>(e.integrity().spoiled.get()));
        for (int other = 0; other < 3; ++other) job.engine(other).Halt(FaultKind::kAborted, rank, "told");
      }
      break;
    }
  });
  return seen;
}

}  // namespace

// Without anybody who mends sockets. Whichever byte it is: of a header, of data or of a checksum. Large messages are
// found by Integrity::kAll, and the first small ones, whose every byte is checked, by Integrity::kSampled as well.
void SpoiledBytes() {
  for (const int stripes : {1, 3}) {
    for (const int byte : kBytes) {
      const std::string fault = "corrupt=" + std::to_string(byte) + ",rank=1";
      CHECK(Spoiled(fault, Integrity::kAll, stripes, kCount) == 3, "%s over %d stripes", fault.c_str(), stripes);
    }
    for (const int byte : kSmallBytes) {
      const std::string fault = "corrupt=" + std::to_string(byte) + ",rank=1";
      CHECK(Spoiled(fault, Integrity::kSampled, stripes, 32) == 3, "%s over %d stripes", fault.c_str(), stripes);
    }
  }
  const std::string torn = "corrupt=70000,rank=1,short=0.8,delay=0.05";
  CHECK(Spoiled(torn, Integrity::kAll, 2, kCount) == 3, "%s", torn.c_str());
}

namespace {

// Pieces that were spoiled on all ranks, of which each came right then.
std::uint64_t Resent(Job& job, const char* what) {
  std::uint64_t found = 0, resent = 0;
  for (int r = 0; r < job.size(); ++r) {
    found += job.engine(r).integrity().spoiled.get();
    resent += job.engine(r).integrity().resent.get();
  }
  CHECK(resent == found, "%s: %zu pieces were spoiled, %zu came right", what, std::size_t{found}, std::size_t{resent});
  return found;
}

// All-reduces of 3 ranks over sockets that are mended, where rank 1 spoils one byte on each link that it uses.
void SentAgain(const std::string& fault, Integrity integrity, int stripes, std::size_t count, bool alone) {
  Job job(
      {.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity, .loopback = true});
  Mender mender(job, 0, 1);
  const std::string what = fault + " over " + std::to_string(stripes);
  for (int i = 0; i < (alone ? 3 : 1); ++i) Allreduce(job, RingAllreduce, DType::kFloat32, count, what.c_str());
  CHECK(Resent(job, what.c_str()) > 0, "%s: nothing was spoiled", what.c_str());
  if (alone) return;
  Allreduce(job, DirectAllreduce, DType::kBfloat16, count, what.c_str());
  Allreduce(job, ScratchAllreduce, DType::kInt8, 3001, what.c_str());
}

}  // namespace

// The same bytes where sockets are mended: the result is right, since nothing was added before it was checked.
void SpoiledAndSentAgain() {
  for (const int stripes : {1, 3}) {
    for (const int byte : kBytes) {
      SentAgain("corrupt=" + std::to_string(byte) + ",rank=1", Integrity::kAll, stripes, kCount, false);
    }
    for (const int byte : kSmallBytes) {
      SentAgain("corrupt=" + std::to_string(byte) + ",rank=1", Integrity::kSampled, stripes, 32, true);
    }
    SentAgain("corrupt=70000,rank=1,short=0.8,delay=0.05", Integrity::kAll, stripes, kCount, true);
  }
}

// A sender that has returned and writes over its memory, and a receiver that comes late, perhaps over sockets that are
// reset besides.
void SpoiledAfterTheCall() {
  struct Kind {
    std::size_t nbytes;
    std::uint64_t byte;
    Integrity integrity;
  };
  // So many messages go by, each with a header, and the next one begins with a piece that is checked.
  constexpr std::uint64_t kBefore = (kSampleOf * Cutter::kPiece + 2999999) / 3000000;
  constexpr std::uint64_t kSampledAt = kBefore * 3000000 + (kBefore + 1) * BlockHeader::kChecked;
  for (const Kind k :
       {Kind{100, 60, Integrity::kAll}, Kind{4000, 3000, Integrity::kAll}, Kind{300000, 200000, Integrity::kAll},
        Kind{1500000, 1000000, Integrity::kAll}, Kind{700, 600, Integrity::kSampled},
        Kind{3000000, 3000060, Integrity::kSampled}, Kind{3000000, kSampledAt + 400, Integrity::kSampled}}) {
    for (const int stripes : {1, 2}) {
      // The sample of a link of several stripes falls elsewhere.
      if (stripes > 1 && k.nbytes == 3000000) continue;
      const std::string fault = "rank=0,corrupt=" + std::to_string(k.byte);
      Job job({.size = 2,
               .over = Over::kTcp,
               .stripes = stripes,
               .fault = fault,
               .integrity = k.integrity,
               .loopback = true});
      Mender mender(job, 0, 1);
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindMessage(e, 2, rank, 1 - rank, rank == 0, k.nbytes);
        for (std::uint64_t round = 0; round < kBefore + 2; ++round) {
          Bytes data(k.nbytes, static_cast<std::byte>(round + 1));
          if (rank == 0) {
            CHECK(RunToEnd(e, shape, data.data(), nullptr) == Outcome::kDone, "%s", e.failure().text.c_str());
            std::fill(data.begin(), data.end(), std::byte{0xee});
          } else {
            SleepMs(round == 0 ? 20 : 0);
            Bytes came(k.nbytes);
            CHECK(RunToEnd(e, shape, nullptr, came.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
            CHECK(came == data, "%s, %zu bytes, round %zu", fault.c_str(), k.nbytes, std::size_t{round});
          }
        }
      });
      CHECK(Resent(job, fault.c_str()) > 0, "%s: nothing was spoiled", fault.c_str());
    }
  }
}

// An edge that spoils again and again, also what is sent again.
void SpoiledForEver() {
  for (const char* fault :
       {"corrupt_every=3000,rank=1", "corrupt_every=40,rank=1", "corrupt=7,corrupt_every=70000,rank=1"}) {
    for (const int stripes : {1, 3}) {
      Job job({.size = 2,
               .over = Over::kTcp,
               .stripes = stripes,
               .fault = fault,
               .integrity = Integrity::kAll,
               .loopback = true});
      Mender mender(job, 0, 1);
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, kCount);
        Outcome outcome = Outcome::kDone;
        for (int i = 0; i < 20 && outcome == Outcome::kDone; ++i) {
          Bytes buffer = Input(rank, kCount, DType::kFloat32);
          outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
          if (outcome == Outcome::kDone) {
            CHECK(buffer == Sum(2, kCount, DType::kFloat32), "%s: wrong data", fault);
          }
        }
        CHECK(outcome == Outcome::kFailed, "%s goes on", fault);
        const Failure failure = e.failure();
        if (rank == 0) {
          CHECK(failure.kind == FaultKind::kCorrupt && failure.peer == 1, "%s: %s", fault, failure.text.c_str());
          CHECK(failure.text.find("for the 9th time") != std::string::npos, "%s", failure.text.c_str());
          CHECK(e.integrity().spoiled.get() >= 9, "%zu", std::size_t{e.integrity().spoiled.get()});
          job.engine(1).Halt(FaultKind::kAborted, 0, "told");
        }
      });
    }
  }
}

// Sockets that are reset, while bytes are spoiled: also one that came before a reset and was not looked at until then.
void SpoiledAndReset() {
  if (!MayReset()) return;
  std::uint64_t spoiled = 0;  // what the reset took with it was not
  for (unsigned seed = 1; seed <= 12; ++seed) {
    const std::string fault =
        "reset=60000,rank=1,corrupt=" + std::to_string(40'000 * seed) + ",seed=" + std::to_string(seed);
    Job job({.size = 2,
             .over = Over::kTcp,
             .stripes = seed % 2 == 0 ? 1 : 2,
             .fault = fault,
             .integrity = Integrity::kAll,
             .loopback = true});
    Mender mender(job, seed % 3 == 0 ? 0 : 4, seed);
    for (int i = 0; i < 4; ++i) Allreduce(job, RingAllreduce, DType::kFloat32, kCount, fault.c_str());
    spoiled += Resent(job, fault.c_str());
  }
  CHECK(spoiled > 0, "nothing was spoiled");
}

// Sound links bring the same with checks as without, and the sample is what was said.
void CheckedLinks() {
  for (const Integrity integrity : {Integrity::kSampled, Integrity::kAll}) {
    for (const int stripes : {1, 3}) {
      for (const char* fault : {"", "short=0.8,seed=5", "delay=0.1,short=0.5,reorder=0.2,seed=3"}) {
        Job job({.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity});
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{3001}, kCount}) {
          Allreduce(job, RingAllreduce, DType::kComplex128, std::min<std::size_t>(count, 20011), fault);
          Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault);
          Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault);
        }
      }
    }
  }
  Job job({.size = 2, .over = Over::kTcp, .integrity = Integrity::kSampled});
  constexpr std::size_t kLarge = 20 << 20;
  for (int i = 0; i < 4; ++i) Allreduce(job, RingAllreduce, DType::kUint64, kLarge / 8, "large");
  const double part = static_cast<double>(job.engine(0).integrity().checked_bytes.get()) / (8.0 * kLarge);
  CHECK(part * kSampleOf > 0.5 && part * kSampleOf < 2, "%g of the bytes were checked", part);
}

// By counts, what a sample is of, for messages of any size: time does not tell a hundredth.
void Samples() {
  for (const std::size_t nbytes : {1u, 8u, 1024u, 1025u, 4096u, 65536u, 300000u, 9000000u}) {
    Cutter cutter(Integrity::kSampled);
    std::size_t messages = 0, blocks = 0, checked = 0, checks = 0;
    for (; messages < 64 || messages * nbytes < std::size_t{256} << 20; ++messages) {
      for (std::size_t at = 0; at < nbytes; ++blocks) {
        const Cutter::Cut cut = cutter.Next(nbytes, nbytes - at, std::size_t{64} << 20);
        at += cut.length;
        checked += cut.checked ? cut.length : 0;
        checks += cut.checked;
      }
    }
    const double part = static_cast<double>(checked) / static_cast<double>(messages * nbytes);
    const double most = nbytes <= kSmall ? 1.0 / kSmallOf : 1.0 / kSampleOf;
    CHECK(part <= most * 1.01, "%g of messages of %zu bytes is checked", part, nbytes);
    CHECK(part > most * 0.9, "%g of messages of %zu bytes is checked", part, nbytes);
    // What is checked is a block by itself, and what lies behind it another one.
    CHECK(blocks - messages <= 2 * checks + messages * (nbytes >> 22), "%zu blocks", blocks);
  }
  CHECK(Cutter(Integrity::kSampled).Next(8, 8, 1 << 20).checked, "the first small message of a link is checked");
}

}  // namespace hetcoll::testing
