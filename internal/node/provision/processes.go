package provision

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// pids is the name of processes in reservations of the kubelet.
const pids = "pid"

// processLimit returns the limit of a machine. An old capstand reports none.
func processLimit(machine int64) int64 { return cmp.Or(machine, 16384) }

// podPidsLimit is a quarter of the machine's limit: one pod must not use up the processes of the others.
func podPidsLimit(machine int64) int64 { return processLimit(machine) / 4 }

// reservedProcesses returns what the kubelet must reserve so that all pods together have at most three quarters of the machine's limit.
// The rest remains for PID 1 and the services. The kubelet subtracts the reservation from the limit of the kernel, because it does not
// know that of the machine.
func reservedProcesses(kernel, machine int64) int64 {
	limit := min(kernel, processLimit(machine))
	return kernel - limit + limit/4
}

// reservation returns the reservation for the services of the machine. Without the limit of the kernel, a kubelet limits no processes.
func (n *node) reservation() map[string]string {
	if n.kernelProcesses == 0 {
		return nil
	}
	return map[string]string{pids: strconv.FormatInt(reservedProcesses(n.kernelProcesses, n.machine.PidsLimit), 10)}
}

// kernelProcesses returns the limit of the kernel as the kubelet reads it, or 0.
func kernelProcesses() (limit int64) {
	for _, file := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		data, _ := os.ReadFile(file)
		if n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64); err == nil && (limit == 0 || n < limit) {
			limit = n
		}
	}
	return limit
}

// RenewReservation corrects the reservation of a machine that starts again. Since then, the host can have got another limit of the kernel,
// for example with other memory: the pods would have too many processes, or none.
func RenewReservation(m machine.Metadata) error {
	config, err := nodeconfig.Load(nodeconfig.Path)
	if errors.Is(err, fs.ErrNotExist) { // The machine has no bootstrap data yet, or that of another provider.
		return nil
	}
	if err != nil {
		return err
	}
	n := &node{NodeConfiguration: config, machine: m, kernelProcesses: kernelProcesses()}
	return n.renewReservation(kubeletConfigFile)
}

// renewReservation changes nothing else in the configuration of the kubelet: only an update may do that.
func (n *node) renewReservation(path string) error {
	wanted, err := n.kubeletConfig()
	if err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	config := map[string]any{}
	if err := errors.Join(err, yaml.Unmarshal(data, &config)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	present, _ := config["systemReserved"].(map[string]any)
	processes, limited := wanted.SystemReserved[pids]
	if !limited || present[pids] == processes {
		return nil
	}
	if present == nil {
		present = map[string]any{}
	}
	present[pids] = processes
	config["systemReserved"] = present
	if data, err = yaml.Marshal(config); err != nil {
		return err
	}
	return certfiles.WriteFile(path, data)
}
