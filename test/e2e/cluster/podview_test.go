//go:build e2e

package cluster

import (
	"fmt"
	"strings"
	"testing"

	"capstan.dev/capstan/test/e2e/harness"
)

// podSees are the pods of checkPodViews, with the text of their container and of their pod. Unmasked pods keep the /proc of the
// kernel. A process of a privileged or unmasked pod can create containers: it mounts proc in a user namespace of its own.
var podSees = []struct {
	name, container, pod string
	machine, nested      bool
}{
	{"ordinary", "", "", true, false},
	{"mapped", "", "hostUsers: false", true, false},
	{"privileged", "privileged: true", "", true, true},
	{"unmasked", "procMount: Unmasked, seccompProfile: {type: Unconfined}", "hostUsers: false", false, true},
}

const podSeesScript = `grep MemTotal /proc/meminfo; echo "processors $(grep -c ^processor /proc/cpuinfo)"
echo "views $(grep -cE ' /proc/(meminfo|cpuinfo) ' /proc/self/mountinfo)"
echo x 2>/dev/null > /proc/meminfo && echo writable
unshare --user --map-root-user --mount --pid --fork --mount-proc true 2>/dev/null && echo nested
exit 0`

// checkPodViews: /proc of a pod has the size of its machine.
func checkPodViews(t *testing.T, c *harness.Cluster) {
	worker := c.Worker(t)
	// The box of the test can have as many processors as the machine.
	size := fmt.Sprintf("MemTotal: %d kB processors %d views 2", worker.Spec.Memory.Value()/1024, worker.Spec.CPUs)
	if worker.Spec.CPUs == 0 {
		t.Fatalf("%s: the template of the test has no CPU limit", worker.Name)
	}
	for _, pod := range podSees {
		manifest := harness.ShellPod("sees-"+pod.name, worker.Name, "/var/lib/sees", 1, podSeesScript, "")
		manifest = strings.Replace(manifest, "spec:\n", "spec:\n  restartPolicy: Never\n  "+pod.pod+"\n", 1)
		if pod.container != "" {
			manifest = strings.Replace(manifest, "{runAsUser: 0}", "{runAsUser: 0, "+pod.container+"}", 1)
		}
		c.Apply(t, manifest)
	}
	for _, pod := range podSees {
		name := "sees-" + pod.name
		out := strings.Join(strings.Fields(finished(t, c, name)), " ")
		if strings.Contains(out, size) != pod.machine {
			t.Errorf("pod %s sees %q; it should have the size of the machine, %s: %v", name, out, size, pod.machine)
		}
		if strings.Contains(out, "nested") != pod.nested || strings.Contains(out, "writable") {
			t.Errorf("pod %s: %q; it should create containers: %v", name, out, pod.nested)
		}
		c.MustKubectl(t, "delete", "pod", name)
	}
}
