// libnvrtc: NVRTC's functions over compile().
#include <cstddef>
#include <cstring>
#include <memory>

#include "compile.h"

using standin::Outcome;
using standin::Program;

#pragma GCC visibility push(default)
extern "C" {

enum nvrtcResult {
  kSuccess = 0,
  kInvalidInput = 3,
  kInvalidProgram = 4,
  kInvalidOption = 5,
  kCompilation = 6,
  kNoNamesAfter = 8,
  kNoNamesBefore = 9,
  kNameNotValid = 10,
  kInternal = 11,
};

const char* nvrtcGetErrorString(nvrtcResult result) {
  switch (result) {
    case kSuccess:
      return "NVRTC_SUCCESS";
    case kInvalidInput:
      return "NVRTC_ERROR_INVALID_INPUT";
    case kInvalidProgram:
      return "NVRTC_ERROR_INVALID_PROGRAM";
    case kInvalidOption:
      return "NVRTC_ERROR_INVALID_OPTION";
    case kCompilation:
      return "NVRTC_ERROR_COMPILATION";
    case kNoNamesAfter:
      return "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case kNoNamesBefore:
      return "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case kNameNotValid:
      return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    case kInternal:
      return "NVRTC_ERROR_INTERNAL_ERROR";
  }
  return "NVRTC_ERROR unknown";
}

nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 99;  // no NVRTC's, so that a cache of compiled kernels keeps the two apart
  return kSuccess;
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = 5;
  return kSuccess;
}

nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  const int supported[] = {75, 80, 86, 90, 100};
  std::memcpy(archs, supported, sizeof supported);
  return kSuccess;
}

nvrtcResult nvrtcCreateProgram(Program** program, const char* source, const char* name, int count,
                               const char* const* headers, const char* const* names) {
  if (!program || !source) return kInvalidInput;
  auto made = std::make_unique<Program>();
  made->source = source;
  made->name = name ? name : "";
  for (int i = 0; i < count; ++i) made->headers.push_back({names[i], headers[i]});
  *program = made.release();
  return kSuccess;
}

nvrtcResult nvrtcDestroyProgram(Program** program) {
  if (!program || !*program) return kInvalidProgram;
  std::unique_ptr<Program> owned(*program);
  *program = nullptr;
  return kSuccess;
}

nvrtcResult nvrtcAddNameExpression(Program* program, const char* expression) {
  if (!program) return kInvalidProgram;
  if (program->compiled) return kNoNamesAfter;
  program->expressions.push_back(expression);
  return kSuccess;
}

nvrtcResult nvrtcGetLoweredName(Program* program, const char* expression, const char** lowered) {
  if (!program->compiled) return kNoNamesBefore;
  auto found = program->lowered.find(expression);
  if (found == program->lowered.end()) return kNameNotValid;
  *lowered = found->second.c_str();
  return kSuccess;
}

nvrtcResult nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  if (!program) return kInvalidProgram;
  switch (standin::compile(*program, std::vector<std::string>(options, options + count), "CUDA", "__CUDACC_RTC__",
                           "sm_75")) {
    case Outcome::kCompiled:
      return kSuccess;
    case Outcome::kBadOption:
      return kInvalidOption;
    case Outcome::kError:
      return kCompilation;
    case Outcome::kBroken:
      break;
  }
  return kInternal;
}

nvrtcResult nvrtcGetCUBINSize(Program* program, std::size_t* nbytes) {
  if (!program || !program->compiled) return kInvalidProgram;
  *nbytes = program->image.size();
  return kSuccess;
}

nvrtcResult nvrtcGetCUBIN(Program* program, char* image) {
  if (!program || !program->compiled) return kInvalidProgram;
  std::memcpy(image, program->image.data(), program->image.size());
  return kSuccess;
}

nvrtcResult nvrtcGetProgramLogSize(Program* program, std::size_t* nbytes) {
  if (!program) return kInvalidProgram;
  *nbytes = program->log.size() + 1;
  return kSuccess;
}

nvrtcResult nvrtcGetProgramLog(Program* program, char* log) {
  if (!program) return kInvalidProgram;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
