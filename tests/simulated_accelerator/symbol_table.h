// The functions of a program or shared library by their addresses, local and hidden ones
// too, which dladdr() does not know. Read from the ELF file's own symbol table.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fsdp::testing::simulated {

class SymbolTable {
 public:
  // Of the functions whose mangled names have that part. Empty for what is not a 64-bit
  // ELF file, or was stripped.
  SymbolTable(const std::string& path, const std::string& part_of_name);

  // The mangled name of the function that has `address` where the file was loaded at
  // `base`; empty for none.
  std::string at(const char* base, const char* address) const;

 private:
  struct Function {
    uint64_t end;
    std::string name;
  };

  std::map<uint64_t, Function> functions_;  // by first address
  bool is_relocated_ = true;                // addresses in the file count from `base`
};

}  // namespace fsdp::testing::simulated
