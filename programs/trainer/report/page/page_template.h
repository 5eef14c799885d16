// page.html with its styles, its script and Chart.js in it; the build writes it
// (embed_page.py). "RUN_DATA" is where the data goes.
#pragma once

#include <string_view>

namespace programs::run_report {

extern const std::string_view page_template;

}  // namespace programs::run_report
