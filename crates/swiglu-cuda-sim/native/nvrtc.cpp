// libnvrtc.so.13: compiles device code with the host's C++ compiler. The file ptx.cuh is replaced
// by the simulator's own; what comes out as a CUBIN is a shared library (see image.hpp).
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "device_abi.hpp"
#include "image.hpp"

extern char** environ;

namespace {

namespace fs = std::filesystem;

enum nvrtcResult : int {
  NVRTC_SUCCESS = 0,
  NVRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  NVRTC_ERROR_INVALID_INPUT = 3,
  NVRTC_ERROR_INVALID_PROGRAM = 4,
  NVRTC_ERROR_INVALID_OPTION = 5,
  NVRTC_ERROR_COMPILATION = 6,
};

struct Program {
  std::string source, log, image;
  std::vector<std::pair<std::string, std::string>> headers;
};

constexpr int ARCHS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

// Where this library and the simulator's headers lie.
fs::path home() {
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&home), &info);
  return fs::canonical(info.dli_fname).parent_path();
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

bool write_file(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out.good();
}

// What the options ask for; unknown ones are refused, as NVRTC does.
struct Request {
  std::string arch;  // sm_90a
  std::vector<std::string> defines;
  std::string standard = "c++17";
  bool contract = true;
  std::string error;
};

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

Request parse(int count, const char* const* options) {
  Request r;
  const auto value = [](const std::string& option) { return option.substr(option.find('=') + 1); };
  for (int i = 0; i < count; ++i) {
    const std::string o = options[i];
    if (starts_with(o, "--gpu-architecture=") || starts_with(o, "-arch=")) {
      r.arch = value(o);
    } else if (starts_with(o, "--std=") || starts_with(o, "-std=")) {
      r.standard = value(o);
    } else if (starts_with(o, "--define-macro=")) {
      r.defines.push_back("-D" + value(o));
    } else if (starts_with(o, "-D") && o.size() > 2) {
      r.defines.push_back(o);
    } else if (starts_with(o, "--fmad=") || starts_with(o, "-fmad=")) {
      r.contract = value(o) == "true";
    } else if (!starts_with(o, "--ptxas-options") && o != "--device-as-default-execution-space" &&
               o != "-default-device" && o != "--generate-line-info" && o != "-lineinfo" &&
               !starts_with(o, "--diag-") && !starts_with(o, "--restrict")) {
      r.error = "nvrtc: error: unrecognized option " + o + " found\n";
    }
  }
  int number = 0;
  char feature[2] = {};
  const bool parsed = std::sscanf(r.arch.c_str(), "sm_%d%1[af]", &number, feature) >= 1;
  if (!parsed || std::find(std::begin(ARCHS), std::end(ARCHS), number) == std::end(ARCHS)) {
    r.error = "nvrtc: error: invalid value for --gpu-architecture (-arch): " + r.arch + "\n";
  }
  return r;
}

std::vector<std::string> compiler_command(const Request& r) {
  int number = 0;
  char feature[2] = {};
  std::sscanf(r.arch.c_str(), "sm_%d%1[af]", &number, feature);
  std::vector<std::string> command = {SIM_CXX,
                                      "-x",
                                      "c++",
                                      "-std=" + r.standard,
                                      "-Og",
                                      "-w",
                                      "-shared",
                                      // What a kernel needs of the libraries comes with libcuda.so.1.
                                      // Reading their symbols would take a fifth of the time.
                                      "-nostdlib",
                                      "-Wl,--no-as-needed",
                                      "-fPIC",
                                      "-fvisibility=hidden",
                                      "-fno-math-errno",
                                      "-fno-strict-aliasing",
                                      "-Wno-psabi",
                                      "-D__CUDA_ARCH__=" + std::to_string(number * 10),
                                      "-DSIM_ARCH=\"" + r.arch + "\""};
  if (feature[0] == 'a') {
    command.push_back("-D__CUDA_ARCH_FEAT_SM" + std::to_string(number) + "_ALL");
  }
  // As on the device, a multiplication and an addition may become one operation.
  command.push_back(r.contract ? "-ffp-contract=fast" : "-ffp-contract=off");
#if defined(__x86_64__)
  if (r.contract && __builtin_cpu_supports("fma")) command.push_back("-mfma");
#endif
  command.insert(command.end(), r.defines.begin(), r.defines.end());
  return command;
}

// Runs the command with its output in a file; true if it succeeded.
bool run(const std::vector<std::string>& command, const fs::path& output) {
  std::vector<char*> arguments;
  for (const std::string& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t child = 0;
  const int spawned =
      posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (spawned != 0 || waitpid(child, &status, 0) != child) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string hex(uint64_t x) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

// The kernels of a library, by the marks that KERNEL leaves in it.
std::vector<std::string> kernels_of(const std::string& library) {
  static const std::string mark = SIM_KERNEL_MARK;
  std::vector<std::string> names;
  for (size_t at = library.find(mark); at != std::string::npos; at = library.find(mark, at + 1)) {
    names.emplace_back(library.c_str() + at + mark.size());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The lines that ptxas -v would print. There are no registers to count.
std::string resource_log(const std::string& library, const std::string& arch) {
  std::string log = "ptxas info    : 0 bytes gmem\n";
  for (const std::string& name : kernels_of(library)) {
    log += "ptxas info    : Compiling entry function '" + name + "' for '" + arch + "'\n" +
           "ptxas info    : Function properties for " + name + "\n" +
           "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n" +
           "ptxas info    : Used 64 registers, used 1 barriers\n";
  }
  return log;
}

std::string with_trailer(std::string library) {
  sim::ImageTrailer trailer{};
  const auto* bytes = reinterpret_cast<const unsigned char*>(library.data());
  if (library.size() < sizeof(Elf64_Ehdr)) return {};
  // Whatever a linker put after the section headers is not needed.
  const uint64_t length = sim::library_bytes(bytes);
  if (length == 0 || length > library.size()) return {};
  library.resize(length);
  std::memcpy(trailer.mark, sim::ImageTrailer::MARK, sizeof trailer.mark);
  trailer.bytes = length;
  trailer.hash = sim::image_hash(reinterpret_cast<const unsigned char*>(library.data()), length);
  library.append(reinterpret_cast<const char*>(&trailer), sizeof trailer);
  return library;
}

nvrtcResult compile(Program& program, const Request& request) {
  const fs::path here = home();
  std::vector<std::string> command = compiler_command(request);
  std::string everything = program.source;
  for (const auto& [name, text] : program.headers) everything += '\0' + name + '\0' + text;
  for (const std::string& part : command) everything += '\0' + part;
  // Kernels are also kept beside this library, which is named after its own sources and compiler,
  // so that a second test run compiles nothing.
  const auto* bytes = reinterpret_cast<const unsigned char*>(everything.data());
  const std::string key = hex(sim::image_hash(bytes, everything.size())) +
                          hex(sim::image_hash(bytes + 1, everything.size() - 1));
  const fs::path kept = here / "compiled" / (key + ".so");
  std::string library = read_file(kept);
  if (library.empty()) {
    std::string temporary = (fs::temp_directory_path() / "swiglu-sim-XXXXXX").string();
    if (mkdtemp(temporary.data()) == nullptr) return NVRTC_ERROR_COMPILATION;
    const fs::path directory = temporary;
    bool written = write_file(directory / "source.cu",
                              program.source +
                                  "\nextern \"C\" __attribute__((visibility(\"default\"), "
                                  "used)) const char sim_image_arch[] = SIM_ARCH;\n");
    for (const auto& [name, text] : program.headers) {
      const bool replaced = fs::path(name).filename() == "ptx.cuh";
      std::error_code made;
      fs::create_directories((directory / name).parent_path(), made);
      written &= !made &&
          write_file(directory / name, replaced ? read_file(here / "device" / "ptx.hpp") : text);
    }
    const fs::path result = directory / "kernel.so";
    command.insert(command.end(),
                   {"-I", directory.string(), "-I", (here / "device").string(), "-include",
                    "cuda_builtins.hpp", (directory / "source.cu").string(), "-x", "none",
                    (here / "libcuda.so.1").string(), "-o", result.string()});
    const bool compiled = written && run(command, directory / "log");
    program.log = read_file(directory / "log");
    library = compiled ? read_file(result) : std::string();
    std::error_code ignored;
    fs::remove_all(directory, ignored);
    if (!compiled) return NVRTC_ERROR_COMPILATION;
    const fs::path beside =
        here / "compiled" /
        (key + "." + std::to_string(getpid()) + "." + hex(reinterpret_cast<uintptr_t>(&program)));
    if (write_file(beside, library)) fs::rename(beside, kept, ignored);
  }
  program.image = with_trailer(std::move(library));
  if (program.image.empty()) return NVRTC_ERROR_COMPILATION;
  program.log = resource_log(program.image, request.arch);
  return NVRTC_SUCCESS;
}

}  // namespace

#define SIM_API extern "C" __attribute__((visibility("default")))

SIM_API nvrtcResult nvrtcVersion(int* major, int* minor) {
  if (major == nullptr || minor == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  // No version of NVIDIA's, so that a cache of kernels never takes its modules for theirs.
  *major = 13;
  *minor = 900;
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  if (count == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *count = static_cast<int>(std::size(ARCHS));
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  if (archs == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  std::copy(std::begin(ARCHS), std::end(ARCHS), archs);
  return NVRTC_SUCCESS;
}
SIM_API const char* nvrtcGetErrorString(nvrtcResult result) {
  switch (result) {
    case NVRTC_SUCCESS:
      return "NVRTC_SUCCESS";
    case NVRTC_ERROR_PROGRAM_CREATION_FAILURE:
      return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case NVRTC_ERROR_INVALID_INPUT:
      return "NVRTC_ERROR_INVALID_INPUT";
    case NVRTC_ERROR_INVALID_PROGRAM:
      return "NVRTC_ERROR_INVALID_PROGRAM";
    case NVRTC_ERROR_INVALID_OPTION:
      return "NVRTC_ERROR_INVALID_OPTION";
    case NVRTC_ERROR_COMPILATION:
      return "NVRTC_ERROR_COMPILATION";
  }
  return "NVRTC_ERROR unknown";
}

SIM_API nvrtcResult nvrtcCreateProgram(Program** program, const char* source, const char*,
                                       int count, const char* const* headers,
                                       const char* const* names) {
  if (program == nullptr || source == nullptr || count < 0) return NVRTC_ERROR_INVALID_INPUT;
  if (count > 0 && (headers == nullptr || names == nullptr)) return NVRTC_ERROR_INVALID_INPUT;
  auto* p = new Program;
  p->source = source;
  for (int i = 0; i < count; ++i) {
    // Headers are written below a directory of the compilation; names that lead out are refused.
    const fs::path path = names[i];
    if (path.is_absolute() || path.string().find("..") != std::string::npos) {
      delete p;
      return NVRTC_ERROR_PROGRAM_CREATION_FAILURE;
    }
    p->headers.emplace_back(names[i], headers[i]);
  }
  *program = p;
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcDestroyProgram(Program** program) {
  if (program == nullptr || *program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  const Request request = parse(count, options);
  if (!request.error.empty()) {
    program->log = request.error;
    return NVRTC_ERROR_INVALID_OPTION;
  }
  return compile(*program, request);
}
SIM_API nvrtcResult nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  if (bytes == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *bytes = program->log.size() + 1;
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcGetProgramLog(Program* program, char* log) {
  if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  if (log == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
  if (bytes == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *bytes = program->image.size();
  return NVRTC_SUCCESS;
}
SIM_API nvrtcResult nvrtcGetCUBIN(Program* program, char* image) {
  if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
  if (image == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  std::memcpy(image, program->image.data(), program->image.size());
  return NVRTC_SUCCESS;
}
