// Accumulating gradients without communication: FSDP's no_sync.
//
//   for (size_t i = 0; i + 1 < batches.size(); ++i) {
//     fsdp::NoSyncGuard no_sync(fsdp::get_fsdp_module(*model));
//     loss(batches[i]).backward();               // no reduction
//   }
//   loss(batches.back()).backward();             // reduces the sum
#pragma once

#include "device_mesh/api.h"
#include "fully_shard/fsdp_module.h"

#include <memory>
#include <vector>

namespace fsdp {

// While it lives, backwards do not reduce the gradients of the unit and of the units
// below it: they add up on this rank, full, and join the next synchronised backward.
// zero_grad() does not reach them; FSDPModule::zero_pending_gradients() does. The end of
// the scope, by an exception too, gives every unit the setting that it had before, so
// guards nest and units that were switched off by hand stay off. Local, but every rank
// must do the same.
class [[nodiscard]] FSDP_API NoSyncGuard {
 public:
  [[nodiscard]] explicit NoSyncGuard(FSDPModule module);
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  struct Setting {
    std::weak_ptr<internal::Unit> unit;
    bool synchronized;
  };
  std::vector<Setting> before_;
};

}  // namespace fsdp
