#include "checkpoint/io/fit.h"

#include "checkpoint/files/raise.h"
#include "checkpoint/format/dtype.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace fsdp::internal::checkpoint {
namespace {

std::string shape_text(c10::IntArrayRef shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

constexpr int64_t kMisfitsShown = 20;

}  // namespace

absl::Status check_fits(const std::string& name, const at::Tensor& target, const Offered& offered,
                        bool cast) {
  if (target.sizes() != offered.shape) {
    return absl::InvalidArgumentError("'" + name + "' has shape " + shape_text(target.sizes()) +
                                      " here and " + shape_text(offered.shape) + " " +
                                      offered.place);
  }
  const auto own = own_dtype(target);  // what a buffer that was cast is saved in
  if (cast || widens_exactly(offered.dtype, own)) return absl::OkStatus();
  return absl::InvalidArgumentError("'" + name + "' is " + c10::toString(own) + " here and " +
                                    c10::toString(offered.dtype) + " " + offered.place +
                                    ", which loses something; " + offered.advice);
}

void Misfits::note(const absl::Status& status) {
  if (status.ok()) return;
  if (!absl::IsInvalidArgument(status)) raise_unless_ok(status);
  if (++count_ <= kMisfitsShown)
    text_ += (text_.empty() ? "" : "; ") + std::string(status.message());
}

void Misfits::raise_any() const {
  if (count_ == 0) return;
  const std::string others =
      count_ > kMisfitsShown ? " and " + std::to_string(count_ - kMisfitsShown) + " more" : "";
  TORCH_CHECK_VALUE(false, text_, others);
}

}  // namespace fsdp::internal::checkpoint
