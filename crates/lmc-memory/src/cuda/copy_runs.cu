// Copies runs of bytes within the memory of a GPU.
//
// `copy_runs.ptx` beside this file is made from it by `cargo xtask ptx`.

struct Run {
    unsigned long long from;
    unsigned long long to;
    unsigned long long len;
};

// Each block of threads copies whole runs, by 16 bytes where both sides allow it.
extern "C" __global__ void __launch_bounds__(512)
lmc_copy_runs(const Run *runs, unsigned count)
{
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
        const Run run = runs[i];
        if ((run.from | run.to | run.len) & 15) {
            const char *from = (const char *)run.from;
            char *to = (char *)run.to;
            for (unsigned long long at = threadIdx.x; at < run.len; at += blockDim.x)
                to[at] = from[at];
            continue;
        }
        const uint4 *from = (const uint4 *)run.from;
        uint4 *to = (uint4 *)run.to;
        const unsigned long long words = run.len / 16;
        const unsigned step = blockDim.x;
        unsigned long long at = threadIdx.x;
        // Four loads are under way before the first store: the link's latency is hidden.
        for (; at + 3 * step < words; at += 4 * step) {
            const uint4 a = from[at], b = from[at + step];
            const uint4 c = from[at + 2 * step], d = from[at + 3 * step];
            to[at] = a;
            to[at + step] = b;
            to[at + 2 * step] = c;
            to[at + 3 * step] = d;
        }
        for (; at < words; at += step)
            to[at] = from[at];
    }
}
