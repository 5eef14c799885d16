#include "fully_shard/separate_storages.h"

#include "device_mesh/internal/given_module.h"
#include "fully_shard/units/shared_storage.h"

namespace fsdp {

void separate_storages(ModuleRef module) {
  auto& root = internal::given_module("separate_storages", module);
  internal::separate_slices(root, {.caller = "separate_storages", .rank = ""});
}

}  // namespace fsdp
