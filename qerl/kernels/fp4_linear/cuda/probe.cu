// Does nothing: the driver is asked how many clusters of some size and shared memory the device runs at the same time.

extern "C" __global__ void probe() {}
