//go:build e2e

package inplace

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/provision"
	"capstan.dev/capstan/test/e2e/harness"
)

// inTurn are the processes of which one is killed in each step, beside the process of the update.
var inTurn = []string{"capstand", "manager", "kube-apiserver"}

// steps are all steps of an update.
var steps = slices.Concat([]string{"check", "save", "files", "first commands", "configuration"}, provision.UpdateServices(), []string{"last commands", "verify", "node"})

// killer kills the process of an update once in each step, and another process that takes part.
type killer struct {
	t      *testing.T
	cancel context.CancelFunc
	done   sync.WaitGroup

	// in are the steps in which it kills.
	in []string
	// controlPlane has the names of the control plane machines; journals those of all machines, by the path of their journal.
	controlPlane map[string]bool
	journals     map[string]string
	// killed has the other process, by machine and step.
	killed map[string]map[string]string
}

// startKiller kills in some steps of the updates of all machines that exist.
func startKiller(t *testing.T, c *harness.Cluster, in ...string) *killer {
	t.Helper()
	k := &killer{t: t, in: in, controlPlane: map[string]bool{}, journals: map[string]string{}, killed: map[string]map[string]string{}}
	for _, m := range c.Machines(t) {
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
			k.controlPlane[m.Name] = true
		}
		folders, err := filepath.Glob(filepath.Join(plane.Root, "hosts", "*", "machines", m.Spec.ID))
		if err != nil || len(folders) != 1 {
			t.Fatalf("the folders of the machine %s: %v, %v", m.Name, folders, err)
		}
		k.journals[filepath.Join(folders[0], "rootfs/var/lib/capstan/update/journal.json")] = m.Name
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	k.cancel = cancel
	k.done.Go(func() {
		for tick := time.NewTicker(5 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			for path, machine := range k.journals {
				k.look(path, machine)
			}
		}
	})
	t.Cleanup(k.stop)
	return k
}

func (k *killer) stop() {
	k.cancel()
	k.done.Wait()
}

// look kills if the machine is in a new step of an update.
func (k *killer) look(path, machine string) {
	var update machineapi.Update
	if atomicfile.ReadJSON(path, &update) != nil || update.Phase != machineapi.UpdateRunning || !slices.Contains(k.in, update.Step) || k.killed[machine][update.Step] != "" {
		return
	}
	all, err := harness.Processes()
	if err != nil || !k.kill(all, func(p harness.Process) bool {
		return p.Machine == machine && strings.HasSuffix(strings.Join(p.Args, " "), "capstan-init node update")
	}) {
		return // The step has ended.
	}
	if k.killed[machine] == nil {
		k.killed[machine] = map[string]string{}
	}
	other := inTurn[k.count(update.Step)%len(inTurn)]
	k.killed[machine][update.Step] = other
	k.kill(all, func(p harness.Process) bool {
		switch {
		case p.Name != other:
			return false
		case other != "kube-apiserver":
			return p.Machine == "" && slices.ContainsFunc(p.Args, func(arg string) bool { return strings.Contains(arg, plane.Root) })
		case k.controlPlane[machine]:
			return p.Machine == machine
		}
		return k.controlPlane[p.Machine]
	})
}

// count returns the number of machines on which a step was interrupted.
func (k *killer) count(step string) (n int) {
	for _, killed := range k.killed {
		if killed[step] != "" {
			n++
		}
	}
	return n
}

// interrupted stops the killer. It fails the test for each step of the killer in which no process was killed.
func (k *killer) interrupted() {
	k.t.Helper()
	k.stop()
	for _, step := range k.in {
		if k.count(step) == 0 {
			k.t.Errorf("no update was interrupted in the step %q; the steps are %q", step, steps)
		}
	}
}

// kill kills the first process that fits.
func (k *killer) kill(all []harness.Process, fits func(harness.Process) bool) bool {
	i := slices.IndexFunc(all, fits)
	return i >= 0 && all[i].PID != os.Getpid() && syscall.Kill(all[i].PID, syscall.SIGKILL) == nil
}
