#include "on_demand/deferred_part.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

class WithoutValues final : public DTensorOwner {
 public:
  explicit WithoutValues(std::string name) : name_(std::move(name)) {}

  void before_write(const at::Tensor& dtensor) override { refuse(dtensor); }
  void before_read(const at::Tensor& dtensor) override { refuse(dtensor); }
  void before_set_data(const at::Tensor& dtensor, const at::Tensor&) override { refuse(dtensor); }
  at::Tensor substitute(const at::Tensor&) override { return {}; }

 private:
  void refuse(const at::Tensor& dtensor) const {
    TORCH_CHECK_VALUE(false, "parameter '", name_, "' of ", to_string(spec_of(dtensor)),
                      " has no values yet. Initialise it before parallelize_module, and call "
                      "fsdp::materialize(model) before it is used (rank ",
                      spec_of(dtensor).mesh().rank(), ")");
  }

  std::string name_;
};

}  // namespace

void make_deferred_part(const at::Tensor& dtensor, std::string name) {
  set_owner(dtensor, c10::make_intrusive<WithoutValues>(std::move(name)));
}

bool is_deferred_part(const at::Tensor& tensor) {
  return is_dtensor(tensor) && dynamic_cast<WithoutValues*>(owner_of(tensor)) != nullptr;
}

void give_part(const at::Tensor& dtensor, const at::Tensor& local) {
  release_part(dtensor);
  replace_local(dtensor, local, /*keys=*/{});
}

void release_part(const at::Tensor& dtensor) { set_owner(dtensor, {}); }

}  // namespace fsdp::internal
