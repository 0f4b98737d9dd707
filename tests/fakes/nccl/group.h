// Groups: what a thread asks for between ncclGroupStart and ncclGroupEnd begins at the end, all at once.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm.h"

namespace fake::nccl {

Result group_start();
Result group_end();

// Adds to this thread's group; without one, it is a group of its own and begins now.
Result add(std::shared_ptr<Comm> comm, const Collective& collective, void* stream);
Result add(std::shared_ptr<Comm> comm, const Message& message, void* stream);
// Something that must meet other ranks (init, split): at the end of the group, each on a thread of its own.
Result add(std::shared_ptr<Comm> comm, std::function<Result()> job);

}  // namespace fake::nccl
