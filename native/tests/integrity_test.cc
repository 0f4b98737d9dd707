// Bytes that are spoiled on the way: the checksum itself, and what links make of it.

#include <numeric>
#include <random>

#include "base/crc32c.h"
#include "harness.h"

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

// All-reduces of 3 ranks, `big` and small, until one fails. How many ranks saw an error, each of which names the edge.
int Spoiled(const std::string& fault, Integrity integrity, int stripes, std::size_t count) {
  Job job({.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity});
  std::atomic<int> seen{0};
  std::atomic<bool> over{false};
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kFloat32, count);
    for (int i = 0; i < 3; ++i) {
      Bytes buffer = Input(rank, count, DType::kFloat32);
      if (RunToEnd(e, shape, buffer.data(), buffer.data(), 5) == Outcome::kDone) {
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

// Whichever byte it is: of a header, of data or of a checksum. Large messages are found by Integrity::kAll, and small
// ones, whose every byte is checked, by Integrity::kSampled as well.
void SpoiledBytes() {
  for (const int stripes : {1, 3}) {
    for (const int byte : {1, 8, 20, 33, 36, 41, 1000, 65536, 65577, 65580, 65581, 65600, 200000}) {
      const std::string fault = "corrupt=" + std::to_string(byte) + ",rank=1";
      CHECK(Spoiled(fault, Integrity::kAll, stripes, kCount) == 3, "%s over %d stripes", fault.c_str(), stripes);
    }
    for (const int byte : {1, 33, 41, 50, 84, 85, 100, 300}) {
      const std::string fault = "corrupt=" + std::to_string(byte) + ",rank=1";
      CHECK(Spoiled(fault, Integrity::kSampled, stripes, 32) == 3, "%s over %d stripes", fault.c_str(), stripes);
    }
  }
  const std::string torn = "corrupt=70000,rank=1,short=0.8,delay=0.05";
  CHECK(Spoiled(torn, Integrity::kAll, 2, kCount) == 3, "%s", torn.c_str());
}

// Sound links bring the same with checks as without, and the sample is what was said.
void CheckedLinks() {
  for (const Integrity integrity : {Integrity::kSampled, Integrity::kAll}) {
    for (const int stripes : {1, 3}) {
      for (const char* fault : {"", "short=0.8,seed=5", "delay=0.1,short=0.5,reorder=0.2,seed=3"}) {
        Job job({.size = 3, .over = Over::kTcp, .stripes = stripes, .fault = fault, .integrity = integrity});
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{3001}, kCount}) {
          Allreduce(job, RingAllreduce, DType::kComplex128, count, fault);
          Allreduce(job, DirectAllreduce, DType::kBfloat16, count, fault);
          Allreduce(job, ScratchAllreduce, DType::kInt8, count, fault);
        }
      }
    }
  }
  Job job({.size = 2, .over = Over::kTcp, .integrity = Integrity::kSampled});
  constexpr std::size_t kLarge = 20 << 20;
  for (int i = 0; i < 4; ++i) Allreduce(job, RingAllreduce, DType::kUint8, kLarge, "large");
  const double part = static_cast<double>(job.engine(0).integrity().checked_bytes.get()) / (8.0 * kLarge);
  CHECK(part > 1.0 / 128 && part < 1.0 / 32, "%g of the bytes were checked", part);
}

}  // namespace hetcoll::testing
