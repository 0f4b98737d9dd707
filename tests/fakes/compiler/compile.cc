#include "compile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

extern char** environ;

namespace fake {
namespace {

// Where this library lies; the shim lies beside it, and so do compiled kernels.
std::string home() {
  static const std::string path = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&compile), &info);
    std::string file = info.dli_fname;
    return file.substr(0, file.rfind('/'));
  }();
  return path;
}

std::string read_file(const std::string& path) {
  std::string text;
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  char part[65536];
  ssize_t count = 0;
  while (fd >= 0 && (count = read(fd, part, sizeof part)) > 0) text.append(part, static_cast<std::size_t>(count));
  if (fd >= 0) close(fd);
  return text;
}

// Held by one process at a time, while this object lives.
class Lock {
 public:
  explicit Lock(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    while (fd_ >= 0 && flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~Lock() {
    if (fd_ >= 0) close(fd_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int fd_;
};

bool write_file(const std::string& path, const std::string& text) {
  int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  bool whole = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  return close(fd) == 0 && whole;
}

std::string hash(const std::string& text) {
  std::uint64_t one = 0xcbf29ce484222325u, two = 0x9ae16a3b2f90404fu;
  for (unsigned char c : text) {
    one = (one ^ c) * 0x100000001b3u;
    two = (two + c) * 0x9ddfea08eb382d69u;
    two ^= two >> 29;
  }
  char out[40];
  std::snprintf(out, sizeof out, "%016llx%016llx", static_cast<unsigned long long>(one),
                static_cast<unsigned long long>(two));
  return out;
}

// Runs the compiler without the fakes in front of its libraries; true when it succeeded.
bool run(const std::vector<std::string>& command, const std::string& log) {
  std::vector<char*> arguments, variables;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  for (char** each = environ; *each; ++each) {
    if (std::strncmp(*each, "LD_", 3) != 0) variables.push_back(*each);
  }
  variables.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t child = 0;
  int status = 1;
  int failed = posix_spawnp(&child, arguments[0], &files, nullptr, arguments.data(), variables.data());
  posix_spawn_file_actions_destroy(&files);
  if (failed) return write_file(log, std::string(arguments[0]) + ": " + std::strerror(failed)) && false;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The names of `__global__` functions in preprocessed text, but templates: those need an expression.
std::set<std::string> kernels_in(const std::string& text) {
  static const std::string mark = "FAKE_KERNEL_HERE";
  std::set<std::string> names;
  for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
    std::size_t begin = text.find_last_of(";{}", at);
    bool is_template = text.substr(begin + 1, at - begin - 1).find("template") != std::string::npos;
    at += mark.size();
    std::size_t open = text.find('(', at);
    std::string name;
    while (open != std::string::npos) {
      std::size_t end = text.find_last_not_of(" \t\n", open - 1) + 1, start = end;
      while (start > at && (std::isalnum(static_cast<unsigned char>(text[start - 1])) || text[start - 1] == '_'))
        --start;
      name = text.substr(start, end - start);
      if (name != "__attribute__") break;
      open = text.find('(', text.find("))", open));  // __attribute__((...)) name(
    }
    if (!is_template && !name.empty()) names.insert(name);
  }
  return names;
}

struct Command {
  std::vector<std::string> common;
  std::string arch;
};

// Options of NVRTC and hipRTC that mean something to g++; those that only tune the vendors' code are dropped.
bool translate(const std::vector<std::string>& options, Command* command) {
  static const char* const dropped[] = {"--fmad",
                                        "-fmad",
                                        "--use_fast_math",
                                        "-use_fast_math",
                                        "--maxrregcount",
                                        "-maxrregcount",
                                        "--device-debug",
                                        "-G",
                                        "--generate-line-info",
                                        "-lineinfo",
                                        "--restrict",
                                        "-restrict",
                                        "--extra-device-vectorization",
                                        "-default-device",
                                        "--device-as-default-execution-space",
                                        "--relocatable-device-code",
                                        "-rdc",
                                        "--ptxas-options",
                                        "-Xptxas",
                                        "--ftz",
                                        "--prec-div",
                                        "--prec-sqrt",
                                        "-O",
                                        "-W",
                                        "-f",
                                        "-m",
                                        "--split-compile",
                                        "-split-compile",
                                        "--no-",
                                        "--minimal",
                                        "--disable-warnings",
                                        "--diag-",
                                        "-dopt",
                                        "--dopt",
                                        "-w"};
  for (std::size_t i = 0; i < options.size(); ++i) {
    const std::string& option = options[i];
    auto is = [&](const char* prefix) { return option.compare(0, std::strlen(prefix), prefix) == 0; };
    auto value = [&] { return option.substr(option.find('=') + 1); };
    if (is("--gpu-architecture=") || is("-arch=") || is("--offload-arch=")) {
      command->arch = value();
    } else if (is("--std=") || is("-std=")) {
      command->common.push_back("-std=" + value());
    } else if (is("--define-macro=")) {
      command->common.push_back("-D" + value());
    } else if (is("--include-path=")) {
      command->common.push_back("-I" + value());
    } else if (is("-D") || is("-I") || is("-U")) {
      command->common.push_back(option);
      if (option.size() == 2 && i + 1 < options.size()) command->common.push_back(options[++i]);
    } else {
      bool known = false;
      for (const char* prefix : dropped) known |= is(prefix);
      if (!known) return false;
    }
  }
  return true;
}

Outcome build(Program& program, const Command& command, const std::string& vendor, const std::string& work,
              const std::string& output) {
  const char* compiler = std::getenv("CXX");
  std::vector<std::string> common = {compiler && *compiler ? compiler : "g++", "-std=c++17"};
  common.insert(common.end(), command.common.begin(), command.common.end());
  for (const char* option : {"-I", "-include", "shim.h"}) {
    common.push_back(option[1] == 'I' ? "-I" + home() : option);
  }
  common.push_back("-I" + work);
  std::string source = work + "/main.cc", text = work + "/main.ii", log = work + "/log";
  for (const Header& header : program.headers) {
    if (!write_file(work + "/" + header.name, header.text)) return Outcome::kBroken;
  }
  std::string whole =
      "#line 1 \"" + (program.name.empty() ? "default_program" : program.name) + "\"\n" + program.source + "\n";
  if (!write_file(source, whole)) return Outcome::kBroken;
  std::vector<std::string> scan = common;
  for (const char* option : {"-E", "-P", "-DFAKE_SCAN", "-o", text.c_str(), source.c_str()}) scan.push_back(option);
  bool compiled = run(scan, log);
  if (compiled) {
    whole += "#include \"tail.h\"\n";
    for (const std::string& name : kernels_in(read_file(text))) whole += "FAKE_KERNEL(" + name + ")\n";
    for (const auto& [expression, lowered] : program.lowered) {
      whole += "FAKE_EXPRESSION(" + lowered + ", " + expression + ")\n";
    }
    if (!write_file(source, whole)) return Outcome::kBroken;
    std::vector<std::string> full = common;
    std::string vendor_macro = "-DFAKE_VENDOR=\"" + vendor + "\"";
    std::string arch_macro = "-DFAKE_IMAGE_ARCH=\"" + command.arch + "\"";
    for (const char* option :
         {"-Og",  // each access is a call of a check, which no optimisation takes away, and -O1 takes twice the time
          "-fno-strict-aliasing",
          "-fno-exceptions",
          "-fno-rtti",
          "-fno-gnu-unique",
          "-ffp-contract=off",
          "-w",
          "-fPIC",
          "-shared",
          "-fsanitize=kernel-address",
          "--param",
          "asan-instrumentation-with-call-threshold=0",
          "--param",
          "asan-stack=0",
          "--param",
          "asan-globals=0",
          "-Wl,-Bsymbolic",
          "-nostartfiles",
          vendor_macro.c_str(),
          arch_macro.c_str(),
          "-o",
          output.c_str(),
          source.c_str()}) {
      full.push_back(option);
    }
    compiled = run(full, log);
  }
  program.log = read_file(log);
  return compiled ? Outcome::kCompiled : Outcome::kError;
}

// Builds in a folder of its own beside `output`, which comes to be as a whole.
Outcome compile_into(const std::string& output, Program& program, const Command& command, const std::string& vendor) {
  std::string work = output.substr(0, output.rfind('/')) + "/work-XXXXXX";
  if (!mkdtemp(work.data())) return Outcome::kBroken;
  Outcome outcome = build(program, command, vendor, work, work + "/image.so");
  if (outcome == Outcome::kCompiled) {
    program.image = read_file(work + "/image.so");
    std::rename((work + "/image.so").c_str(), output.c_str());
  }
  for (const Header& header : program.headers) unlink((work + "/" + header.name).c_str());
  for (const char* name : {"/main.cc", "/main.ii", "/log"}) unlink((work + name).c_str());
  rmdir(work.c_str());
  return outcome;
}

}  // namespace

Outcome compile(Program& program, const std::vector<std::string>& options, const std::string& vendor,
                const std::string& macro, const std::string& default_arch) {
  Command command{{"-D" + macro + "=1"}, default_arch};
  if (!translate(options, &command)) return Outcome::kBadOption;
  std::size_t count = 0;
  for (const std::string& expression : program.expressions) {
    program.lowered[expression] = "fake_expression_" + std::to_string(count++);
  }
  std::string key = vendor + '\0' + command.arch + '\0' + program.source + '\0' + program.name;
  for (const std::string& option : command.common) key += '\0' + option;
  for (const Header& header : program.headers) key += '\0' + header.name + '\0' + header.text;
  for (const auto& [expression, lowered] : program.lowered) key += '\0' + expression;

  std::string cache = home() + "/kernels";
  mkdir(cache.c_str(), 0777);
  std::string output = cache + "/" + hash(key) + ".so";
  program.image = read_file(output);
  if (program.image.empty()) {
    // All ranks of a job want the same kernels at the same time: one compiles, and the others wait for its image.
    Lock lock(output + ".lock");
    program.image = read_file(output);
    Outcome outcome = program.image.empty() ? compile_into(output, program, command, vendor) : Outcome::kCompiled;
    if (outcome != Outcome::kCompiled) return outcome;
  }
  program.compiled = true;
  return Outcome::kCompiled;
}

}  // namespace fake
