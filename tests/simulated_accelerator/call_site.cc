#include "tests/simulated_accelerator/call_site.h"

#include "tests/simulated_accelerator/symbol_table.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

namespace fsdp::testing::simulated {
namespace {

constexpr size_t kDeepest = 96;
constexpr size_t kMostFrames = 3;

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? std::string(text.get()) : symbol;
}

// A function's name up to the bracket that opens its arguments, which is no bracket of a
// template's argument, of "(anonymous namespace)" or of "operator()".
std::string without_arguments(const std::string& name) {
  const std::string_view unnamed = "(anonymous namespace)", call = "operator()";
  int open_templates = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name.compare(i, unnamed.size(), unnamed) == 0) {
      i += unnamed.size() - 1;
    } else if (name.compare(i, call.size(), call) == 0) {
      i += call.size() - 1;
    } else if (name[i] == '(' && open_templates == 0) {
      return name.substr(0, i);
    } else {
      open_templates += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    }
  }
  return name;
}

std::string function_name(const void* address) {
  static auto& tables = *new std::map<std::string, SymbolTable>;
  Dl_info module = {};
  if (dladdr(address, &module) == 0 || module.dli_fname == nullptr) return "";
  const std::string file = module.dli_fname;
  if (!tables.contains(file)) tables.emplace(file, SymbolTable(file, "fsdp"));
  const auto* const base = static_cast<const char*>(module.dli_fbase);
  // The address is where the call returns to, which may be behind the function's end.
  const auto name = demangled(tables.at(file).at(base, static_cast<const char*>(address) - 1));
  return without_arguments(name);
}

const std::string& cached_name(const void* address) {
  static auto& mutex = *new std::mutex;
  static auto& names = *new std::map<const void*, std::string>;
  const std::lock_guard lock(mutex);
  const auto [known, is_new] = names.try_emplace(address);
  if (is_new) known->second = function_name(address);
  return known->second;
}

bool is_of_library(const std::string& name) {
  return name.find("fsdp::") != std::string::npos &&
         name.find("fsdp::testing::") == std::string::npos;
}

}  // namespace

CallSite call_site_of_library() {
  void* frames[kDeepest];
  const int depth = backtrace(frames, kDeepest);
  CallSite place;
  for (int i = 0; i < depth && place.size() < kMostFrames; ++i) {
    if (is_of_library(cached_name(frames[i]))) place.push_back(frames[i]);
  }
  return place;
}

std::string to_string(const CallSite& place) {
  std::string text;
  for (const auto* frame : place) {
    if (!text.empty()) text += " < ";
    text += cached_name(frame);
  }
  return text;
}

}  // namespace fsdp::testing::simulated
