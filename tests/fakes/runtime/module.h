// Loaded code: an image is a shared object that compiler/ made.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "errors.h"
#include "hooks.h"

namespace fake {

struct Function {
  std::string name;
  const Kernel* kernel = nullptr;
};

struct Module {
  void* library = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;
  ~Module();
};

struct Shape {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
};

// kInvalidImage: not ours; kNoBinary: another architecture's.
Error load_module(const void* image, Module** module);
Error unload_module(Module* module);
Error get_function(Module* module, const char* name, Function** function);
Error get_global(Module* module, const char* name, std::uintptr_t* address, std::size_t* nbytes);
bool known_module(Module* module);
bool known_function(Function* function);

// `parameters`: a pointer to each argument; or, where it is null, `extra`: one buffer of all of them, laid out as a
// struct ({1, buffer, 2, &nbytes, 0}). Either is read before the call returns.
Error launch(Stream* stream, Function* function, const Shape& shape, void** parameters, void** extra);

// Runs a kernel's threads here and now; used by launch's operation.
Error run_kernel(Execution& execution, const Function& function, const Shape& shape, void** arguments);

const Hooks& hooks();

}  // namespace fake
