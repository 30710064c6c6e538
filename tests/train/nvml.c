/* NVML with one accelerator: the entries that Holdfast asks for, with the names, structs and codes of nvml.h, so that the
   real binding (pynvml) and what it makes of them are tried. Each figure is a file in the folder NVML_FIGURES: what is
   not there is not supported, and a negative number is an error of that code. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, ARGUMENT_VERSION_MISMATCH = 25 };

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;

static int device;

static nvmlReturn_t value_of(const char *name, unsigned long long *value) {
    char path[4096];
    long long read;
    snprintf(path, sizeof path, "%s/%s", getenv("NVML_FIGURES"), name);
    FILE *file = fopen(path, "r");
    if (file == NULL) return NOT_SUPPORTED;
    int found = fscanf(file, "%lld", &read);
    fclose(file);
    if (found != 1) return NOT_SUPPORTED;
    if (read < 0) return (nvmlReturn_t)-read;
    *value = (unsigned long long)read;
    return SUCCESS;
}

static nvmlReturn_t told_int(nvmlDevice_t gpu, const char *name, unsigned int *value) {
    unsigned long long read;
    if (gpu != &device) return INVALID_ARGUMENT;
    nvmlReturn_t code = value_of(name, &read);
    if (code == SUCCESS) *value = (unsigned int)read;
    return code;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return SUCCESS; }

nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case 15: return "GPU is lost";
        default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *gpu) {
    if (strcmp(uuid, "GPU-12-34") != 0) return NOT_FOUND;
    *gpu = &device;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned int *current, unsigned int *pending) {
    *pending = 0;
    return told_int(gpu, "mig", current);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t gpu, unsigned long long *millijoules) {
    return gpu == &device ? value_of("millijoules", millijoules) : INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t gpu, unsigned int *milliwatts) {
    return told_int(gpu, "milliwatts", milliwatts);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *rates) {
    rates->memory = 7;
    return told_int(gpu, "busy", &rates->gpu);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *memory) {
    if (gpu != &device) return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t code = value_of("memory_used", &memory->used);
    if (code != SUCCESS) return code;
    memory->total = 80ull << 30;
    memory->reserved = 1ull << 30;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, int sensor, unsigned int *celsius) {
    return sensor == 0 ? told_int(gpu, "celsius", celsius) : INVALID_ARGUMENT; /* NVML_TEMPERATURE_GPU */
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t gpu, int clock, unsigned int *megahertz) {
    return clock == 1 ? told_int(gpu, "megahertz", megahertz) : INVALID_ARGUMENT; /* NVML_CLOCK_SM */
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t gpu, unsigned long long *reasons) {
    return gpu == &device ? value_of("reasons", reasons) : INVALID_ARGUMENT;
}
