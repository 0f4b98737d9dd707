#include "harness.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <complex>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>

#include "transport/tls.h"

namespace hetcoll::testing {

namespace {

// Element i of a rank: small enough that sums over four ranks stay exact in 8-bit floats.
unsigned Value(int rank, std::size_t i, DType dtype) {
  return Hash(i * 8 + static_cast<std::size_t>(rank) + 1) % (ItemSize(dtype) == 1 ? 2 : 60);
}

// A value in the bits of a float of so many bits of mantissa.
constexpr unsigned Narrow(unsigned value, int mantissa, int bias) {
  if (value == 0) return 0;
  const int e = std::bit_width(value) - 1;
  return static_cast<unsigned>(e + bias) << mantissa | ((value ^ (1u << e)) << mantissa >> e);
}

// value(i) for each element of the first ones, which come again behind them: a sanitizer makes each step dear. So many
// lie no multiple of any ring, slot or piece apart.
constexpr std::size_t kPeriod = 10007;

template <class Values>
Bytes Numbers(DType dtype, std::size_t count, Values&& value) {
  Bytes out(count * ItemSize(dtype));
  const auto store = [&](auto&& bits) {
    for (std::size_t i = 0; i < std::min(count, kPeriod); ++i) {
      const auto x = bits(value(i));
      std::memcpy(out.data() + i * sizeof x, &x, sizeof x);
    }
    const std::size_t size = ItemSize(dtype);
    for (std::size_t i = kPeriod; i < count; i += kPeriod)
      std::memcpy(out.data() + i * size, out.data(), std::min(count - i, kPeriod) * size);
  };
  const auto floats = [&]<class Bits>(Bits, int mantissa, int bias) {
    store([=](unsigned v) { return static_cast<Bits>(Narrow(v, mantissa, bias)); });
  };
  const auto as = [&]<class T>(T) { store([](unsigned v) { return static_cast<T>(v); }); };
  switch (dtype) {
    case DType::kFloat16:
      floats(std::uint16_t{}, 10, 15);
      break;
    case DType::kBfloat16:
      floats(std::uint16_t{}, 7, 127);
      break;
    case DType::kFloat8E4m3fn:
      floats(std::uint8_t{}, 3, 7);
      break;
    case DType::kFloat8E5m2:
      floats(std::uint8_t{}, 2, 15);
      break;
    case DType::kFloat8E4m3fnuz:
      floats(std::uint8_t{}, 3, 8);
      break;
    case DType::kFloat8E5m2fnuz:
      floats(std::uint8_t{}, 2, 16);
      break;
    case DType::kFloat32:
      as(float{});
      break;
    case DType::kFloat64:
      as(double{});
      break;
    case DType::kComplex64:
      as(std::complex<float>{});
      break;
    case DType::kComplex128:
      as(std::complex<double>{});
      break;
    default:
      switch (ItemSize(dtype)) {
        case 1:
          as(std::uint8_t{});
          break;
        case 2:
          as(std::uint16_t{});
          break;
        case 4:
          as(std::uint32_t{});
          break;
        default:
          as(std::uint64_t{});
      }
  }
  return out;
}

}  // namespace

Bytes Input(int rank, std::size_t count, DType dtype) {
  return Numbers(dtype, count, [=](std::size_t i) { return Value(rank, i, dtype); });
}

Bytes Sum(int size, std::size_t count, DType dtype) {
  return Numbers(dtype, count, [=](std::size_t i) {
    unsigned sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += Value(rank, i, dtype);
    return dtype == DType::kBool ? unsigned{sum > 0} : sum;
  });
}

std::pair<std::vector<int>, std::vector<int>> SocketPairs(int count) {
  std::vector<int> mine, theirs;
  for (int s = 0; s < count; ++s) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    mine.push_back(pair[0]);
    theirs.push_back(pair[1]);
  }
  return {std::move(mine), std::move(theirs)};
}

std::pair<int, int> TcpPair(int card) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int mine = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + static_cast<std::uint32_t>(card));
  socklen_t length = sizeof address;
  auto* at = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, at, length) != 0 || listen(listener, 1) != 0 || getsockname(listener, at, &length) != 0 ||
      connect(mine, at, length) != 0) {
    std::abort();
  }
  const int theirs = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (theirs < 0) std::abort();
  close(listener);
  return {mine, theirs};
}

void Encrypt(int a, int b) {
  const TlsKey key{std::byte{42}};
  std::shared_ptr<Tls> ends[2];
  for (const int end : {0, 1}) {
    const int fd = end == 0 ? a : b;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    ends[end] = std::make_shared<Tls>(fd, key, end == 1, false);
  }
  bool sent[2] = {}, came[2] = {};
  std::byte word{1};
  const iovec piece{&word, 1};
  while (!came[0] || !came[1]) {
    for (const int end : {0, 1}) {
      sent[end] = sent[end] || ends[end]->Send({&piece, 1}) == 1;
      came[end] = came[end] || ends[end]->Receive(&word, 1) == 1;
    }
  }
  Tls::Hand(a, std::move(ends[0]));
  Tls::Hand(b, std::move(ends[1]));
}

namespace {

std::pair<std::vector<int>, std::vector<int>> TcpPairs(int count) {
  std::vector<int> mine, theirs;
  for (int s = 0; s < count; ++s) {
    const auto [one, other] = TcpPair(s);
    mine.push_back(one);
    theirs.push_back(other);
  }
  return {std::move(mine), std::move(theirs)};
}

}  // namespace

Job::Job(const JobOptions& o) : size_(o.size), tls_(o.tls) {
  const bool crowded = o.size > static_cast<int>(std::thread::hardware_concurrency());
  for (int r = 0; r < o.size; ++r) {
    engines_.push_back(std::make_unique<Engine>(EngineOptions{r, o.size, 0x1234, r, o.spin_seconds, crowded, o.fault,
                                                              o.sleep_slice_ns, o.recovery_ns, o.integrity}));
  }
  if (o.over == Over::kShm) {
    MapAll(o);
  } else {
    if (o.over == Over::kVerbs) AddNics(o);
    for (int r = 0; o.loopback && r < size_; ++r) engine(r).MendTcp();
    ConnectAll(o);
  }
}

Job::~Job() = default;

void Job::Run(const std::function<void(int, Engine&)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size_; ++r) threads.emplace_back([&, r] { body(r, engine(r)); });
  for (std::thread& t : threads) t.join();
}

void Job::MapAll(const JobOptions& o) {
  const ShmLayout layout(size_, o.ring_bytes);
  const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
  std::vector<int> ranks(static_cast<std::size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  // One mapping for all: TSan knows memory by its address.
  const auto segment = std::make_shared<ShmSegment>(fd, layout, o.shm);
  for (auto& engine : engines_) engine->AttachShm(segment->Share(), ranks);
  close(fd);
}

void Job::AddNics(const JobOptions& o) {
  fabric_ = std::make_unique<Fabric>(o.fabric);
  for (int r = 0; r < size_; ++r) {
    for (int k = 0; k < o.rails; ++k) {
      NicInfo nic = fabric_->AddNic("fake" + std::to_string(r) + "-" + std::to_string(k));
      nic.timeout = 10;  // 4 ms
      if (engine(r).AddNic(nic, Fabric::Api()) != k) std::abort();
    }
  }
  if (o.prepare) o.prepare(*fabric_);
}

void Job::ConnectAll(const JobOptions& o) {
  for (int a = 0; a < size_; ++a) {
    for (int b = a + 1; b < size_; ++b) {
      for (int channel = 0; channel < kChannels; ++channel) {
        const auto [mine, theirs] = o.loopback || o.sockets ? TcpPairs(o.stripes) : SocketPairs(o.stripes);
        for (std::size_t s = 0; tls_ && s < mine.size(); ++s) Encrypt(mine[s], theirs[s]);
        Attach(o, a, b, channel, mine);
        Attach(o, b, a, channel, theirs);
      }
    }
  }
}

void Job::Attach(const JobOptions& o, int rank, int peer, int channel, const std::vector<int>& fds) {
  if (o.over == Over::kTcp) return engine(rank).AttachTcp(peer, channel, fds);
  std::vector<std::pair<int, std::string>> rails;
  for (int k = 0; k < o.rails; ++k) rails.emplace_back(k, "fake" + std::to_string(peer) + "-" + std::to_string(k));
  engine(rank).AttachVerbs(peer, channel, rails, o.ring_bytes, fds);
}

std::uint64_t Descriptor(Algorithm algorithm, DType dtype, std::size_t count) {
  return reinterpret_cast<std::uintptr_t>(algorithm) ^ (static_cast<std::uint64_t>(dtype) << 56) ^ count;
}

std::shared_ptr<Shape> BindAllreduce(Engine& e, int size, int rank, Algorithm algorithm, DType dtype,
                                     std::size_t count) {
  return e.Bind(e.AddPlan(algorithm(size, rank)), dtype, ReduceOp::kSum, count, count, {}, {},
                Descriptor(algorithm, dtype, count), false);
}

std::shared_ptr<Shape> BindMessage(Engine& e, int size, int rank, int peer, bool sends, std::size_t nbytes) {
  return e.Bind(e.AddPlan(Message(size, rank, peer, sends)), DType::kUint8, ReduceOp::kSum, sends ? nbytes : 0,
                sends ? 0 : nbytes, {}, {}, nbytes, true);
}

Outcome RunToEnd(Engine& e, const std::shared_ptr<Shape>& shape, const void* send, void* recv, double seconds) {
  std::shared_ptr<Task> pending;
  const Outcome outcome = e.RunPrompt(shape, send, recv, pending);
  return outcome == Outcome::kPending ? e.Drive(*pending, DeadlineNs(seconds)) : outcome;
}

double ProcessorSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void CheckNothingUnderWay(Job& job, const char* what) {
  for (int from = 0; from < job.size(); ++from) {
    const std::vector<std::uint64_t> all = job.engine(from).Sent();
    for (int to = 0; to < job.size(); ++to) {
      std::uint64_t bytes = 0;
      for (int channel = 0; channel < kLinkChannels; ++channel)
        bytes += job.engine(from).Through(to, channel, true).first;
      CHECK(all[static_cast<std::size_t>(to)] == bytes, "%s: rank %d sent rank %d %zu bytes, counted as %zu", what,
            from, to, std::size_t{bytes}, std::size_t{all[static_cast<std::size_t>(to)]});
      for (int channel = 0; channel < kChannels && from != to; ++channel) {
        const auto sent = job.engine(from).Through(to, channel, true);
        const auto came = job.engine(to).Through(from, channel, false);
        CHECK(sent == came, "%s: rank %d sent rank %d %zu bytes in %zu messages, %zu in %zu came", what, from, to,
              std::size_t{sent.first}, std::size_t{sent.second}, std::size_t{came.first}, std::size_t{came.second});
      }
    }
  }
}

void Allreduce(Job& job, Algorithm algorithm, DType dtype, std::size_t count, const char* what) {
  const Bytes want = Sum(job.size(), count, dtype);
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, job.size(), rank, algorithm, dtype, count);
    const Bytes in = Input(rank, count, dtype);
    Bytes out(in.size());
    Outcome outcome = RunToEnd(e, shape, in.data(), out.data());
    CHECK(outcome == Outcome::kDone, "%s: type %d, count %zu: %s", what, int(dtype), count, e.failure().text.c_str());
    CHECK(out == want, "%s: type %d, count %zu, rank %d", what, int(dtype), count, rank);
    out = in;
    outcome = RunToEnd(e, shape, out.data(), out.data());
    CHECK(outcome == Outcome::kDone && out == want, "%s: in place, type %d, count %zu", what, int(dtype), count);
  });
  CheckNothingUnderWay(job, what);
}

// TSan, under which all takes ten times as long, sees nothing where there is one
// thread.
int Play(std::span<const Scenario> scenarios, std::string_view which) {
#ifdef __SANITIZE_THREAD__
  constexpr bool kOnlyThreads = true;
#else
  constexpr bool kOnlyThreads = false;
#endif
  std::size_t first = 1, parts = 1;
  if (const std::size_t slash = which.find('/'); slash != which.npos) {
    first = std::strtoul(which.data(), nullptr, 10);
    parts = std::max(1ul, std::strtoul(which.data() + slash + 1, nullptr, 10));
    which = {};
  }
  for (std::size_t i = 0; i < scenarios.size(); ++i) {
    const Scenario& scenario = scenarios[i];
    if (i % parts != first % parts || !std::string_view(scenario.name).starts_with(which)) continue;
    if (kOnlyThreads && scenario.alone) continue;
    const std::int64_t start = NowNs();
    const double before = ProcessorSeconds();
    scenario.run();
    std::printf("%-12s %6.2f s, %6.2f s of processors\n", scenario.name, Seconds(start), ProcessorSeconds() - before);
    std::fflush(stdout);
  }
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed > 0 || passed == 0;
}

}  // namespace hetcoll::testing
