#include "checkpoint/plan/state_names.h"

#include <string_view>
#include <tuple>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// "a.b.exp_avg" -> {"a.b", "exp_avg"}
std::pair<std::string, std::string> split_last(const std::string& text) {
  const size_t dot = text.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), text)
                                  : std::pair(text.substr(0, dot), text.substr(dot + 1));
}

}  // namespace

StateName state_name_from(const std::string& text, const Json& lists) {
  const std::string rest = text.substr(std::string_view(kStatePrefix).size());
  StateName name;
  std::tie(name.parameter, name.field) = split_last(rest);
  if (is_number(name.field) && lists.contains(kStatePrefix + name.parameter)) {
    name.index = std::stoll(name.field);
    std::tie(name.parameter, name.field) = split_last(name.parameter);
  }
  return name;
}

std::string to_string(const StateName& name) {
  const std::string text = kStatePrefix + name.parameter + "." + name.field;
  return name.index < 0 ? text : text + "." + std::to_string(name.index);
}

}  // namespace fsdp::internal::checkpoint
