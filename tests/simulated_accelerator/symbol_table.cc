#include "tests/simulated_accelerator/symbol_table.h"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

// Values of a type at a place in a file; none where the file ends before.
template <class T>
std::vector<T> values_at(std::ifstream& file, uint64_t offset, uint64_t count) {
  std::vector<T> values(count);
  const auto bytes = static_cast<std::streamsize>(count * sizeof(T));
  file.clear();
  file.seekg(static_cast<std::streamoff>(offset));
  if (!file.read(reinterpret_cast<char*>(values.data()), bytes)) return {};
  return values;
}

bool is_elf(const std::vector<Elf64_Ehdr>& headers) {
  return !headers.empty() && std::memcmp(headers[0].e_ident, ELFMAG, SELFMAG) == 0 &&
         headers[0].e_ident[EI_CLASS] == ELFCLASS64;
}

}  // namespace

SymbolTable::SymbolTable(const std::string& path, const std::string& part_of_name) {
  std::ifstream file(path, std::ios::binary);
  const auto headers = values_at<Elf64_Ehdr>(file, 0, 1);
  if (!is_elf(headers)) return;
  is_relocated_ = headers[0].e_type == ET_DYN;
  const auto sections = values_at<Elf64_Shdr>(file, headers[0].e_shoff, headers[0].e_shnum);
  for (const auto& section : sections) {
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
    const auto& names = sections[section.sh_link];
    const auto texts = values_at<char>(file, names.sh_offset, names.sh_size);
    const auto count = section.sh_size / sizeof(Elf64_Sym);
    for (const auto& symbol : values_at<Elf64_Sym>(file, section.sh_offset, count)) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_name >= texts.size()) continue;
      const std::string name = &texts[symbol.st_name];
      if (name.find(part_of_name) == std::string::npos) continue;
      functions_[symbol.st_value] = {symbol.st_value + symbol.st_size, name};
    }
  }
}

std::string SymbolTable::at(const char* base, const char* address) const {
  auto place = reinterpret_cast<uint64_t>(address);
  if (is_relocated_) place -= reinterpret_cast<uint64_t>(base);
  const auto after = functions_.upper_bound(place);
  if (after == functions_.begin()) return "";
  const auto& function = std::prev(after)->second;
  return place < function.end ? function.name : "";
}

}  // namespace fsdp::testing::simulated
