#include "checkpoint/io/misfits.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/json.h"
#include "checkpoint/ranks/tensor_values.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/units/unit.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <map>
#include <sstream>
#include <unordered_set>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// Names may be any bytes, so they travel as binary JSON.
std::string packed(const UnmatchedNames& names) {
  const auto bytes =
      Json::to_cbor(Json{{"missing", names.missing}, {"unexpected", names.unexpected}});
  return std::string(bytes.begin(), bytes.end());
}

UnmatchedNames unpacked(const std::string& text) {
  const Json json = Json::from_cbor(text);
  return {json.at("missing").get<std::vector<std::string>>(),
          json.at("unexpected").get<std::vector<std::string>>()};
}

}  // namespace

std::string fingerprint_of(const UnmatchedNames& names) { return checksum_text(packed(names)); }

UnmatchedNames unmatched_by_all(const UnmatchedNames& mine, const World& world,
                                const std::string& what) {
  UnmatchedNames all;
  std::unordered_set<std::string> known;
  std::map<std::string, int64_t> unexpected_by;  // how many ranks
  for (const auto& text : exchange(world, packed(mine), what)) {
    const UnmatchedNames theirs = unpacked(text);
    for (const auto& name : theirs.missing) {
      if (known.insert(name).second) all.missing.push_back(name);
    }
    for (const auto& name : theirs.unexpected) unexpected_by[name] += 1;
  }
  for (const auto& [name, ranks] : unexpected_by) {
    if (ranks == world.size) all.unexpected.push_back(name);
  }
  return all;
}

void check_no_names(const std::vector<std::string>& missing, const std::string& place,
                    const std::vector<std::string>& unexpected, const std::string& advice) {
  std::string text;
  if (!missing.empty()) text += "missing in " + place + ": " + list_of(missing) + "; ";
  if (!unexpected.empty()) text += "in " + place + " only: " + list_of(unexpected) + "; ";
  TORCH_CHECK_VALUE(text.empty(), text, advice);
}

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
  const auto codec = codec_of(target);
  if (!offered.codec.empty() && offered.codec != codec) {
    return absl::InvalidArgumentError(
        "'" + name + "' is " + (codec.empty() ? "no codes" : "codes of '" + codec + "'") +
        " here and codes of '" + offered.codec + "' " + offered.place);
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

namespace {

at::Tensor as_bytes(const at::Tensor& plain) {
  return internal::tensor_bytes(plain.resolve_conj().resolve_neg().contiguous());
}

}  // namespace

bool have_same_values(const at::Tensor& a, const at::Tensor& b) {
  const c10::NoGradGuard no_grad;
  if (a.is_same(b)) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (is_dtensor(a) != is_dtensor(b)) return false;
  if (is_dtensor(a) && !(spec_of(a) == spec_of(b))) return false;
  const at::Tensor mine = local_value(a), other = local_value(b);
  return mine.numel() == 0 || at::equal(as_bytes(mine), as_bytes(other.to(mine.device())));
}

void check_tied_in_file(const Catalog& catalog, const std::vector<std::string>& stored_names,
                        const std::string& name, const at::Tensor& target, ReadRules rules) {
  if (stored_names.size() < 2) return;
  TensorReader reader(catalog, std::move(rules));
  std::vector<at::Tensor> values;
  for (const auto& stored_name : stored_names) {
    values.push_back(at::empty_like(target.detach()));
    raise_unless_ok(reader.plan(stored_name, name, values.back()));
  }
  raise_unless_ok(reader.read());
  for (size_t i = 1; i < values.size(); ++i) {
    TORCH_CHECK_VALUE(have_same_values(values[0], values[i]), "'", stored_names[0], "' and '",
                      stored_names[i], "' are one tensor in the model, and the file has different ",
                      "values under these names. LoadOptions::name_in_file may give both names ",
                      "the one whose values are wanted");
  }
}

}  // namespace fsdp::internal::checkpoint
