#include "checkpoint/plan/savable.h"

#include <c10/util/Exception.h>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kStridedOnly =
    "checkpoints hold strided tensors, such as to_dense(), or indices() and values(), give";
constexpr const char* kReserved = "__metadata__";

// With a question mark in a diamond for what is not UTF-8.
std::string readable(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

bool is_utf8(const Json& json) {
  try {
    json.dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

}  // namespace

void check_name(const std::string& name) {
  TORCH_CHECK_VALUE(is_utf8(name), "the name ", readable(name), " is not UTF-8, which names in a ",
                    "checkpoint must be");
  TORCH_CHECK_VALUE(name != kReserved, "the name '", name,
                    "' is one that safetensors files keep for themselves");
}

void check_has_values(const NamedTensor& named) {
  const at::Tensor& tensor = named.tensor;
  TORCH_CHECK_VALUE(tensor.defined(), "'", named.name, "' is an undefined tensor");
  TORCH_CHECK_VALUE(!tensor.is_nested(), "'", named.name, "' is a nested tensor; ", kStridedOnly);
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, "'", named.name, "' is of layout ",
                    tensor.layout(), "; ", kStridedOnly);
  TORCH_CHECK_VALUE(!tensor.is_meta(), "'", named.name, "' is on the meta device and so has no ",
                    "values; fsdp::materialize gives a model's parameters some");
}

void check_savable(const std::vector<SaveItem>& items) {
  for (const SaveItem& item : items) {
    check_name(item.name);
    for (const NamedTensor& each : item.tensors) {
      check_name(each.name);
      check_has_values(each);
    }
    for (const auto& [other, first] : item.ties) check_name(other);
  }
}

std::string text_of(const Json& json, const std::string& name) {
  TORCH_CHECK_VALUE(is_utf8(json), "'", name, "' holds a string that is not UTF-8: ",
                    json.dump(-1, ' ', false, Json::error_handler_t::replace));
  return json.dump();
}

}  // namespace fsdp::internal::checkpoint
