// What NVRTC and hipRTC have in common, which is nearly all: each includes this with its own names.
//   RTC(name)             nvrtc##name          RTC_WORD "NVRTC"
//   RTC_IMAGE(_SIZE)      nvrtcGetCUBIN(Size)  RTC_VENDOR, RTC_MACRO, RTC_ARCH   for compile()
#include <cstddef>
#include <cstring>
#include <memory>

#include "compile.h"

using fake::Outcome;
using fake::Program;

#pragma GCC visibility push(default)
extern "C" {

enum RtcResult {
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

const char* RTC(GetErrorString)(RtcResult result) {
  switch (result) {
    case kSuccess:
      return RTC_WORD "_SUCCESS";
    case kInvalidInput:
      return RTC_WORD "_ERROR_INVALID_INPUT";
    case kInvalidProgram:
      return RTC_WORD "_ERROR_INVALID_PROGRAM";
    case kInvalidOption:
      return RTC_WORD "_ERROR_INVALID_OPTION";
    case kCompilation:
      return RTC_WORD "_ERROR_COMPILATION";
    case kNoNamesAfter:
      return RTC_WORD "_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case kNoNamesBefore:
      return RTC_WORD "_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case kNameNotValid:
      return RTC_WORD "_ERROR_NAME_EXPRESSION_NOT_VALID";
    case kInternal:
      return RTC_WORD "_ERROR_INTERNAL_ERROR";
  }
  return RTC_WORD "_ERROR unknown";
}

RtcResult RTC(CreateProgram)(Program** program, const char* source, const char* name, int count,
                             const char* const* headers, const char* const* names) {
  if (!program || !source) return kInvalidInput;
  auto made = std::make_unique<Program>();
  made->source = source;
  made->name = name ? name : "";
  for (int i = 0; i < count; ++i) made->headers.push_back({names[i], headers[i]});
  *program = made.release();
  return kSuccess;
}

RtcResult RTC(DestroyProgram)(Program** program) {
  if (!program || !*program) return kInvalidProgram;
  std::unique_ptr<Program> owned(*program);
  *program = nullptr;
  return kSuccess;
}

RtcResult RTC(AddNameExpression)(Program* program, const char* expression) {
  if (!program) return kInvalidProgram;
  if (program->compiled) return kNoNamesAfter;
  program->expressions.push_back(expression);
  return kSuccess;
}

RtcResult RTC(GetLoweredName)(Program* program, const char* expression, const char** lowered) {
  if (!program->compiled) return kNoNamesBefore;
  auto found = program->lowered.find(expression);
  if (found == program->lowered.end()) return kNameNotValid;
  *lowered = found->second.c_str();
  return kSuccess;
}

RtcResult RTC(CompileProgram)(Program* program, int count, const char* const* options) {
  if (!program) return kInvalidProgram;
  switch (
      fake::compile(*program, std::vector<std::string>(options, options + count), RTC_VENDOR, RTC_MACRO, RTC_ARCH)) {
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

RtcResult RTC_IMAGE_SIZE(Program* program, std::size_t* nbytes) {
  if (!program || !program->compiled) return kInvalidProgram;
  *nbytes = program->image.size();
  return kSuccess;
}

RtcResult RTC_IMAGE(Program* program, char* image) {
  if (!program || !program->compiled) return kInvalidProgram;
  std::memcpy(image, program->image.data(), program->image.size());
  return kSuccess;
}

RtcResult RTC(GetProgramLogSize)(Program* program, std::size_t* nbytes) {
  if (!program) return kInvalidProgram;
  *nbytes = program->log.size() + 1;
  return kSuccess;
}

RtcResult RTC(GetProgramLog)(Program* program, char* log) {
  if (!program) return kInvalidProgram;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
