#include "fully_shard/separate_storages.h"

#include "fully_shard/units/shared_storage.h"

#include <c10/util/Exception.h>

namespace fsdp {

void separate_storages(ModuleRef module) {
  TORCH_CHECK_VALUE(module.get() != nullptr,
                    "separate_storages: the module is null (a shared_ptr that was never set?); "
                    "give a module");
  internal::separate_slices(*module.get(), {.caller = "separate_storages", .rank = ""});
}

}  // namespace fsdp
