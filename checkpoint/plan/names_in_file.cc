#include "checkpoint/plan/names_in_file.h"

#include <c10/util/Exception.h>

#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace fsdp::internal::checkpoint {

bool is_index(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

std::pair<std::string, std::string> split_last(const std::string& text) {
  const size_t dot = text.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), text)
                                  : std::pair(text.substr(0, dot), text.substr(dot + 1));
}

StateName state_name_from(const std::string& text, const Json& lists) {
  const std::string rest = text.substr(std::string_view(kStatePrefix).size());
  StateName name;
  std::tie(name.parameter, name.field) = split_last(rest);
  if (is_index(name.field) && lists.contains(kStatePrefix + name.parameter)) {
    name.index = std::stoll(name.field);
    std::tie(name.parameter, name.field) = split_last(name.parameter);
  }
  return name;
}

std::string to_string(const StateName& name) {
  const std::string text = kStatePrefix + name.parameter + "." + name.field;
  return name.index < 0 ? text : text + "." + std::to_string(name.index);
}

namespace {

using NameInFile = std::function<std::string(const std::string&)>;

// The new names of one item.
class Renaming {
 public:
  Renaming(const NameInFile& name_in_file, const std::string& option, const std::string& item)
      : name_in_file_(name_in_file), option_(option), item_(item) {}

  // Of the tensor that is called `first` before all else.
  std::string of(const std::string& name, const std::string& first) {
    const std::string renamed = name_in_file_(name);
    TORCH_CHECK_VALUE(!renamed.empty(), option_, " gives '", name, "' of '", item_,
                      "' an empty name");
    check_name(renamed);
    const auto& [other, tensor] = taken_.try_emplace(renamed, name, first).first->second;
    TORCH_CHECK_VALUE(tensor == first, option_, " gives '", other, "' and '", name, "' of '", item_,
                      "', which are two tensors, one name: '", renamed, "'");
    return renamed;
  }
  std::string of(const std::string& name) { return of(name, name); }

 private:
  const NameInFile& name_in_file_;
  const std::string &option_, &item_;
  std::map<std::string, std::pair<std::string, std::string>> taken_;  // by new name: name and first
};

void rename_tensors(SaveItem& item, Renaming& names) {
  std::map<std::string, std::string> ties;
  for (auto& each : item.tensors) each.name = names.of(each.name);
  for (const auto& [other, first] : item.ties) {
    const std::string now = names.of(other, first), owner = names.of(first);
    if (now != owner) ties.emplace(now, owner);
  }
  item.ties = std::move(ties);
}

// The details that OptimizerTensors have.
Json renamed_details(Json details, const std::function<std::string(const std::string&)>& rename,
                     Renaming& names) {
  const auto rename_keys = [&](const char* field) {
    if (!details.contains(field)) return;
    Json renamed = Json::object();
    for (const auto& [name, value] : details.at(field).items()) renamed[rename(name)] = value;
    details[field] = std::move(renamed);
  };
  for (Json& name : details.at("scalars")) name = rename(name.get<std::string>());
  for (Json& group : details.at("groups")) {
    for (Json& name : group.at("params")) name = names.of(name.get<std::string>());
  }
  rename_keys("values");
  rename_keys("lists");
  return details;
}

void rename_state(SaveItem& item, Renaming& names) {
  const Json lists = item.details.at("lists");
  const auto rename = [&](const std::string& text) {
    StateName name = state_name_from(text, lists);
    name.parameter = names.of(name.parameter);
    return to_string(name);
  };
  for (auto& each : item.tensors) each.name = rename(each.name);
  item.details = renamed_details(std::move(item.details), rename, names);
}

}  // namespace

void rename_in_file(std::vector<SaveItem>& items, const NameInFile& name_in_file,
                    const std::string& option) {
  if (!name_in_file) return;
  for (SaveItem& item : items) {
    Renaming names(name_in_file, option, item.name);
    if (item.kind == "optimizer") {
      rename_state(item, names);
    } else {
      rename_tensors(item, names);
    }
  }
}

}  // namespace fsdp::internal::checkpoint
