// Compiles a kernel's source into an image that the fake drivers load: a shared object that g++ makes. NVRTC's
// and hipRTC's fakes are two faces of it.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace fake {

struct Header {
  std::string name, text;
};

struct Program {
  std::string source, name;
  std::vector<Header> headers;
  std::vector<std::string> expressions;
  std::map<std::string, std::string> lowered;  // of each expression
  std::string image, log;
  bool compiled = false;
};

enum class Outcome { kCompiled, kError, kBadOption, kBroken };

// `vendor` is what the image says, `macro` what the vendor's own compiler defines, `default_arch` without an option.
Outcome compile(Program& program, const std::vector<std::string>& options, const std::string& vendor,
                const std::string& macro, const std::string& default_arch);

}  // namespace fake
