// Compressed edges: codecs on memory of exactly their size, and all-reduces whose numbers every format holds.

#include "harness.h"

namespace hetcoll::testing {
namespace {

constexpr Format kFormatList[] = {Format::kBf16, Format::kFp8, Format::kInt8};
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};

// algorithms/direct.py with a rank a host: what leaves a rank is rounded first.
Encoded Compressed(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  p.Compress();
  for (int d = 1; d < n; ++d) {
    const int to = (r + d) % n;
    p.Send(0, Draft::Out(to), to, 0, {p.Local(Op::kRound, 4, Draft::Out(to), Draft::In(to))});
  }
  int reduced = -1;
  for (int d = 1; d < n; ++d) {
    reduced = p.RecvReduce(1, Draft::Out(r), d == 1 ? Draft::In(r) : Draft::Out(r), (r - d + n) % n, 0);
  }
  const int final = p.Local(Op::kRound, 5, Draft::Out(r), Draft::Out(r), {reduced});
  for (int d = 1; d < n; ++d) p.Send(2, Draft::Out(r), (r + d) % n, 1, {final});
  for (int d = 1; d < n; ++d) p.Recv(3, Draft::Out((r - d + n) % n), (r - d + n) % n, 1);
  return p.Encode();
}

void Sums(Job& job, DType dtype, Format format, std::size_t count) {
  const Bytes want = Sum(job.size(), count, dtype);
  job.Run([&](int rank, Engine& e) {
    const auto shape = e.Bind(e.AddPlan(Compressed(job.size(), rank)), dtype, ReduceOp::kSum, count, count, {}, {},
                              Descriptor(Compressed, dtype, count), false, false, format);
    CHECK(shape->bound.residuals == count, "%zu residuals of %zu", shape->bound.residuals, count);
    std::vector<float> residual(count);
    for (const bool feedback : {false, true}) {
      const Bytes in = Input(rank, count, dtype);
      Bytes out(in.size());
      std::shared_ptr<Task> task = e.Submit(shape, in.data(), out.data(), feedback ? residual.data() : nullptr);
      CHECK(e.Drive(*task, DeadlineNs(kPatience)) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(out == want, "type %d, format %d, count %zu, rank %d", int(dtype), int(format), count, rank);
      CHECK(std::ranges::all_of(residual, [](float lost) { return lost == 0; }), "nothing is lost of these numbers");
    }
  });
}

}  // namespace

void Codecs() {
  for (const DType dtype : kTypes) {
    for (const Format format : kFormatList) {
      const Codec* codec = FindCodec(dtype, format);
      CHECK((codec == nullptr) == (ItemSize(dtype) == 2 && format == Format::kBf16), "which there are");
      if (codec == nullptr) continue;
      for (std::size_t count = 0; count < 100; ++count) {
        const Bytes in = Input(0, count, dtype);
        Bytes rounded(in.size()), codes(codec->Bytes(count)), back(in.size());
        std::vector<float> residual(count);
        codec->round(rounded.data(), in.data(), residual.data(), count);
        codec->encode(codes.data(), rounded.data(), count);
        codec->decode(back.data(), codes.data(), count);
        CHECK(back == rounded, "type %d, format %d, count %zu", int(dtype), int(format), count);
        CHECK(codec->Elements(codes.size()) == count, "%zu bytes are %zu elements", codes.size(), count);
        const Bytes noise = Pattern(codes.size(), unsigned(count));  // from no peer of ours, and decoded to something
        codec->decode(back.data(), noise.data(), count);
      }
    }
  }
}

void CompressedSums() {
  const JobOptions links[] = {{.ring_bytes = 4096},
                              {},
                              {.ring_bytes = 16384, .fault = "short=0.5,delay=0.1"},
                              {.over = Over::kTcp},
                              {.over = Over::kTcp, .stripes = 3},
                              {.over = Over::kVerbs, .rails = 2}};
  for (const JobOptions& options : links) {
    Job job(options);
    for (const std::size_t count : {0, 1, 2, 63, 64, 65, 1009, 100003}) {
      Sums(job, DType::kFloat32, Format::kBf16, count);
      Sums(job, DType::kFloat32, Format::kInt8, count);  // sums of two ranks are below 127
      Sums(job, DType::kFloat16, Format::kInt8, count);
    }
  }
  Job job({});
  job.Run([&](int rank, Engine& e) {
    const int plan = e.AddPlan(Compressed(2, rank));
    for (const auto& [dtype, format] : {std::pair{DType::kFloat32, Format::kNone}, {DType::kInt32, Format::kInt8}}) {
      bool refused = false;
      try {
        e.Bind(plan, dtype, ReduceOp::kSum, 4, 4, {}, {}, 0, false, false, format);
      } catch (const PlanError&) {
        refused = true;
      }
      CHECK(refused, "a plan that compresses, without a format of this type");
    }
  });
}

}  // namespace hetcoll::testing
