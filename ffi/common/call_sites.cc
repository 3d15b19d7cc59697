// call_sites.cc: the table of call sites.
#include "common/call_sites.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace jax_ring {
namespace {

// A message that lists more sites than this does not help.
constexpr size_t kMaxSites = 4;

std::mutex mutex;
std::map<std::string, std::vector<std::string>>& table() {
  static auto* const sites = new std::map<std::string, std::vector<std::string>>;  // outlives every thread
  return *sites;
}

}  // namespace

void note_call_site(const std::string& call, const std::string& site) {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string>& sites = table()[call];
  if (sites.size() < kMaxSites && std::find(sites.begin(), sites.end(), site) == sites.end()) sites.push_back(site);
}

std::string called_at(const std::string& call) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = table().find(call);
  if (found == table().end()) return "";
  std::string text;
  for (const std::string& site : found->second) text += (text.empty() ? ", called at " : " or ") + site;
  return text;
}

}  // namespace jax_ring
