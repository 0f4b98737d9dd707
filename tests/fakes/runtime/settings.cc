#include "settings.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fake {
namespace {

std::atomic<bool> forked{false};
thread_local bool calls_permitted = true;
thread_local Error late_error = kOk;

// "cuMemAlloc_v2" is cuMemAlloc to everybody but the linker.
std::string plain(const char* function) {
  std::string name = function;
  std::size_t mark = name.rfind("_v");
  if (mark != std::string::npos && mark + 3 == name.size()) name.resize(mark);
  return name;
}

struct Failure {
  long first = 1;
  bool later_too = false;
  bool late = false;  // on the stream, not from the call
  int code = 0;
};

// NAME:N:CODE,... where N is the count of the call ("3"; "3+": and every later one) and CODE a number, or "late" and
// a number: the call succeeds and its operation fails on the stream.
std::multimap<std::string, Failure> parse_failures(const char* text) {
  std::multimap<std::string, Failure> failures;
  std::string rest = text ? text : "";
  while (!rest.empty()) {
    std::size_t comma = rest.find(',');
    std::string item = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    std::size_t one = item.find(':'), two = item.rfind(':');
    if (one == std::string::npos || one == two) {
      std::fprintf(stderr, "FAKE_FAIL: \"%s\" is not NAME:N:CODE\n", item.c_str());
      std::abort();
    }
    Failure failure;
    std::string count = item.substr(one + 1, two - one - 1), code = item.substr(two + 1);
    failure.first = std::atol(count.c_str());
    failure.later_too = count.back() == '+';
    failure.late = code.compare(0, 4, "late") == 0;
    failure.code = std::atoi(code.c_str() + (failure.late ? 4 : 0));
    failures.emplace(item.substr(0, one), failure);
  }
  return failures;
}

struct Calls {
  std::mutex mutex;
  std::multimap<std::string, Failure> failures = parse_failures(setting("FAIL"));
  std::map<std::string, long> counts;
  int log = -1;

  Calls() {
    if (!settings().log_path.empty()) {
      log = open(settings().log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    }
  }

  Error count(const char* function) {
    if (failures.empty() && log < 0) return kOk;
    std::lock_guard lock(mutex);
    std::string name = plain(function);
    if (log >= 0) {
      char line[160];
      int length = std::snprintf(line, sizeof line, "%d %ld %s\n", getpid(), syscall(SYS_gettid), name.c_str());
      if (write(log, line, static_cast<std::size_t>(length)) < 0) log = -1;
    }
    long call = ++counts[name];
    auto [begin, end] = failures.equal_range(name);
    for (auto it = begin; it != end; ++it) {
      const Failure& failure = it->second;
      if (call != failure.first && !(failure.later_too && call > failure.first)) continue;
      if (!failure.late) return static_cast<Error>(failure.code);
      late_error = static_cast<Error>(failure.code);
    }
    return kOk;
  }
};

bool truth(const char* text, bool fallback) { return text ? std::strcmp(text, "0") != 0 : fallback; }

std::vector<int> visible(int count) {
  std::vector<int> devices;
  const char* text = std::getenv(kVendor.visible_variable);
  for (int i = 0; !text && i < count; ++i) devices.push_back(i);
  while (text && *text) {
    char* end = nullptr;
    long device = std::strtol(text, &end, 10);
    if (end == text || device < 0 || device >= count) break;  // the drivers ignore whatever follows a bad one
    devices.push_back(static_cast<int>(device));
    text = *end == ',' ? end + 1 : end;
  }
  return devices;
}

Settings read_settings() {
  auto text = [](const char* name, const char* fallback) {
    const char* value = setting(name);
    return value ? value : fallback;
  };
  Settings s;
  s.devices = visible(std::atoi(text("DEVICES", "1")));
  s.memory = static_cast<std::size_t>(std::strtoull(text("MEMORY", "2147483648"), nullptr, 10));
  s.arch = text("ARCH", kVendor.arch);
  const char* queues = std::getenv(kVendor.queues_variable);
  s.queues = queues ? std::atoi(queues) : kVendor.queues;
  if (s.queues < 1) s.queues = 1;
  if (s.queues > 32) s.queues = 32;
  s.peer = truth(setting("PEER"), true);
  s.stream_waits = truth(setting("STREAM_WAITS"), true);
  s.signal_only = truth(std::getenv("GPU_STREAMOPS_CP_WAIT"), false);
  s.dmabuf = truth(setting("DMABUF"), true);
  s.large_bar = truth(setting("LARGE_BAR"), true);
  s.strict = truth(setting("STRICT"), false);
  s.timeout = std::atof(text("TIMEOUT", "60"));
  const char* jitter = setting("JITTER");  // SEED or SEED:MICROSECONDS
  s.jitter = jitter != nullptr;
  s.seed = jitter ? std::strtoull(jitter, nullptr, 10) : 0;
  const char* colon = jitter ? std::strchr(jitter, ':') : nullptr;
  s.jitter_us = colon ? static_cast<unsigned>(std::atoi(colon + 1)) : 500;
  s.log_path = text("LOG", "");
  return s;
}

}  // namespace

const char* setting(const char* name) {
  std::string own = std::string("FAKE_") + kVendor.name + "_" + name;
  const char* value = std::getenv(own.c_str());
  return value ? value : std::getenv((std::string("FAKE_") + name).c_str());
}

const Settings& settings() {
  static const Settings* const read = new Settings(read_settings());
  return *read;
}

Error enter(const char* function) {
  static Calls* const calls = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return new Calls;
  }();
  if (forked) return kNotInitialized;
  if (!calls_permitted) return kNotPermitted;
  late_error = kOk;
  return calls->count(function);
}

Error take_late_error() {
  Error error = late_error;
  late_error = kOk;
  return error;
}

void permit_calls(bool permitted) { calls_permitted = permitted; }

void complain(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "fake %s, process %d: %s\n", kVendor.name, getpid(), text);
}

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace fake
