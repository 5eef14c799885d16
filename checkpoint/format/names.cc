#include "checkpoint/format/names.h"

#include <c10/util/Exception.h>

namespace fsdp::internal::checkpoint {
namespace {

constexpr size_t kShown = 20;

}  // namespace

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

void check_no_names(const std::vector<std::string>& missing, const std::string& place,
                    const std::vector<std::string>& unexpected, const std::string& advice) {
  std::string text;
  if (!missing.empty()) text += "missing in " + place + ": " + list_of(missing) + "; ";
  if (!unexpected.empty()) text += "in " + place + " only: " + list_of(unexpected) + "; ";
  TORCH_CHECK_VALUE(text.empty(), text, advice);
}

}  // namespace fsdp::internal::checkpoint
