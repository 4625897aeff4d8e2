#!/bin/busybox sh
# The first and only program of a guest: makes a soft-RoCE device and runs one or both of the two
# sides over it. Lines that begin with @ are read by xtask/src/rdma/guest.rs.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmp /dev/shm; mount -t tmpfs tmp /tmp
for module in $(cat /modules/order); do
  insmod "/modules/$module.ko" || echo "@problem insmod $module failed"
done
role=$(sed -n 's/.*lmc.role=\([a-z]*\).*/\1/p' /proc/cmdline)
. /variables
ip link set lo up
if [ "$role" = both ] || [ "$role" = suite ]; then
  device=d0; own=10.77.0.1
  ip link add d0 type dummy
else
  for i in $(seq 50); do
    device=$(ls /sys/class/net | grep '^e' | head -1); [ -n "$device" ] && break; sleep 0.2
  done
  [ "$role" = serve ] && own=10.77.0.1 || own=10.77.0.2
fi
ip addr add $own/24 dev $device
ip link set $device up
rdma link add rxe0 type rxe netdev $device || echo "@problem no soft-RoCE device"
port=/sys/class/infiniband/rxe0/ports/1
for i in $(seq 50); do grep -q ACTIVE $port/state && break; sleep 0.2; done
echo "@device $(rdma link show | head -1)"
counters() {
  for file in $port/hw_counters/*; do echo "@counter $1 ${file##*/} $(cat $file)"; done
}
run_server() {
  UCX_LOG_FILE=/tmp/serve.ucx two_sides serve 10.77.0.1:7777 $FLAGS > /tmp/serve.out 2> /tmp/serve.err
  sed 's/^/@server /' /tmp/serve.err | head -40
}
run_driver() {
  counters before
  UCX_LOG_FILE=/tmp/drive.ucx two_sides drive 10.77.0.1:7777 $FLAGS 2> /tmp/drive.err | sed 's/^/@driver /'
  counters after
  sed 's/^/@stderr /' /tmp/drive.err | head -40
  grep 'cfg#' /tmp/drive.ucx | sed 's/^/@ucx /'
}
run_suite() {
  for property in $(sed -n 's/.*lmc.properties=\([a-z_,]*\).*/\1/p' /proc/cmdline | tr , ' '); do
    echo "@property $property"
    LMC_NIXL_SCENARIO=suite:$property UCX_LOG_FILE=/tmp/suite.ucx.$property \
      suite --exact nixl::scenario --nocapture --test-threads=1 2>&1 | sed 's/^/@suite /'
    grep 'cfg#' /tmp/suite.ucx.$property | grep -v 'self cfg#' | sed 's/^/@suite-ucx /'
  done
}
case $role in
  both) run_server & run_driver; sleep 1; run_suite ;;
  serve) echo "@serving"; run_server ;;
  drive) run_driver ;;
  suite) counters before; run_suite; counters after ;;
esac
echo "@over"
poweroff -f
