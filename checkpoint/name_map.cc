#include "checkpoint/name_map.h"

#include "checkpoint/files/errors.h"
#include "device_mesh/internal/name_pattern.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

namespace fsdp {
namespace {

std::optional<std::string> renamed(const NameMap::Entry& entry, const std::string& name) {
  const auto& [from, to] = entry;
  // The whole model is what all names are below.
  const std::string path = from.empty() && !name.empty() ? "." + name : name;
  const auto found = internal::match_name(from, path);
  if (!found) return std::nullopt;
  std::string text;
  size_t star = 0;
  for (const char letter : to) {
    if (letter == '*') {
      text += found->stars[star++];
    } else {
      text += letter;
    }
  }
  text += found->below;
  return to.empty() && text.starts_with('.') ? text.substr(1) : text;
}

std::string text_of(const NameMap::Entry& entry) {
  return "{\"" + entry.first + "\", \"" + entry.second + "\"}";
}

void check_entry(const NameMap::Entry& entry) {
  const auto stars = [](const std::string& text) {
    return std::count(text.begin(), text.end(), '*');
  };
  TORCH_CHECK_VALUE(stars(entry.first) == stars(entry.second), "NameMap: entry ", text_of(entry),
                    " has ", stars(entry.first), " '*' on the model's side and ",
                    stars(entry.second), " on the file's; allowed are as many on both");
}

// ": <what>: a, b"; empty for none.
std::string listed(const std::string& what, const std::vector<std::string>& names) {
  return names.empty() ? "" : ": " + what + ": " + internal::checkpoint::list_of(names);
}

}  // namespace

NameMap::NameMap(std::initializer_list<Entry> entries) : NameMap(std::vector<Entry>(entries)) {}

NameMap::NameMap(std::vector<Entry> entries) : entries_(std::move(entries)) {
  for (const auto& entry : entries_) check_entry(entry);
}

std::string NameMap::operator()(const std::string& name) const {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (auto other = renamed(*entry, name)) return *std::move(other);
  }
  return name;
}

NameMap NameMap::reversed() const {
  std::vector<Entry> entries;
  for (const auto& [own, in_file] : entries_) entries.emplace_back(in_file, own);
  return NameMap(std::move(entries));
}

void NameMap::check(const std::vector<std::string>& names) const {
  std::vector<std::string> unused, together, lost;
  std::map<std::string, std::string> taken;  // by the file's name, the model's
  const auto back = reversed();
  for (const auto& name : names) {
    const auto in_file = (*this)(name);
    const auto& first = taken.emplace(in_file, name).first->second;
    if (first != name)
      together.push_back(first + " and " + name + " become " + in_file);
    else if (back(in_file) != name)
      lost.push_back(name + " becomes " + in_file + ", and that " + back(in_file));
  }
  for (const auto& entry : entries_) {
    const auto means = [&](const std::string& name) { return renamed(entry, name).has_value(); };
    if (std::none_of(names.begin(), names.end(), means)) unused.push_back(text_of(entry));
  }
  const auto wrong = listed("entries that mean nothing", unused) +
                     listed("names that fall together", together) +
                     listed("names that do not come back", lost);
  TORCH_CHECK_VALUE(wrong.empty(), "NameMap", wrong);
}

}  // namespace fsdp
