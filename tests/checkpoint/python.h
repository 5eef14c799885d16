// The Python that some tests ask: the interpreter of the environment that LibTorch lies
// in, or the one that CHECKPOINT_PYTHON names.
#pragma once

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace fsdp::testing {

// .../bin/python3 for a LibTorch in .../lib/python3.*/site-packages/torch/lib.
inline std::string python_interpreter() {
  if (const char* named = std::getenv("CHECKPOINT_PYTHON")) return named;
  Dl_info library;
  const auto* some_function = reinterpret_cast<const void*>(&at::get_num_threads);
  if (dladdr(some_function, &library) == 0) return "python3";
  const auto path = std::filesystem::canonical(library.dli_fname);
  auto environment = path;
  for (int i = 0; i < 6; ++i) environment = environment.parent_path();
  const auto python = environment / "bin/python3";
  return std::filesystem::exists(python) ? python.string() : "python3";
}

// Whether it has what tests/checkpoint/fixtures/*.py import.
inline bool python_has_torch() {
  static const bool has =
      std::system(
          (python_interpreter() + " -c 'import torch, safetensors, numpy' 2> /dev/null").c_str()) ==
      0;
  return has;
}

// Runs a script of fixtures/; its exit status.
inline int run_python(const std::string& script, const std::string& arguments) {
  const std::string command =
      python_interpreter() + " tests/checkpoint/fixtures/" + script + " " + arguments;
  return std::system(command.c_str());
}

inline constexpr const char* kNoPython =
    "NOTHING WAS CHECKED: the interpreter has no torch, safetensors and numpy. tools/setup "
    "installs them, unless TORCH_DIR is given; then install them there or name another "
    "interpreter by CHECKPOINT_PYTHON";

}  // namespace fsdp::testing
