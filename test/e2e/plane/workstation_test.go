//go:build e2e

package plane

import (
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/thread"
	"capstan.dev/capstan/test/e2e/harness"
)

// nobody is the user on the workstation.
const nobody = "65534"

// workstation is a network namespace without any route. Only connections to the address of the management API leave it, as
// through a firewall. Its user has a kubeconfig and no privileges.
type workstation struct {
	i          *installation
	namespace  *os.File
	kubeconfig string
}

// newWorkstation creates the user and the Role of docs/workstation.md.
func (i *installation) newWorkstation() *workstation {
	i.t.Helper()
	w := &workstation{i: i, kubeconfig: filepath.Join(filepath.Dir(i.root), "ada.kubeconfig")}
	server, err := url.Parse(i.status().Server)
	if err != nil {
		i.t.Fatal(err)
	}
	w.openNamespace(server.Host)
	i.kubectl("create", "namespace", "team-a")
	i.kubectl("create", "serviceaccount", "ada", "--namespace", "team-a")
	roles := filepath.Join(i.t.TempDir(), "roles.yaml")
	page, err := os.ReadFile("../../../docs/workstation.md")
	if err != nil {
		i.t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(page), "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	if err := os.WriteFile(roles, []byte(block), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.kubectl("apply", "-f", roles)
	i.kubectl("create", "rolebinding", "ada", "--namespace", "team-a", "--role", "cluster-operator", "--serviceaccount", "team-a:ada")
	i.kubectl("create", "clusterrolebinding", "ada", "--clusterrole", "capstan-host-viewer", "--serviceaccount", "team-a:ada")
	token := strings.TrimSpace(i.kubectl("create", "token", "ada", "--namespace", "team-a"))
	ca, err := base64.StdEncoding.DecodeString(i.kubectl("config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.certificate-authority-data}"))
	if err != nil {
		i.t.Fatal(err)
	}
	content := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: none, contexts: [{name: none, context: {cluster: none, user: none}},
{name: team-a, context: {cluster: c, user: u, namespace: team-a}}], users: [{name: u, user: {token: %q}}],
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %q}}]}`, token, server.String(), base64.StdEncoding.EncodeToString(ca))
	if err := os.WriteFile(w.kubeconfig, []byte(content), 0o644); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() { os.Remove(w.kubeconfig) })
	w.reachesOnlyTheAPI()
	return w
}

// reachesOnlyTheAPI: the workstation has no route, and its user has no right for the administrator's kubeconfig and for the
// socket of capstand.
func (w *workstation) reachesOnlyTheAPI() {
	w.i.t.Helper()
	if routes, err := w.try("ip", "route", "show", "table", "main"); err != nil || strings.TrimSpace(routes) != "" {
		w.i.t.Fatalf("the workstation has routes: %q, %v", routes, err)
	}
	for _, address := range addresses(w.i.t) {
		if route, err := w.try("ip", "route", "get", address); err == nil {
			w.i.t.Errorf("the workstation has a route to the host: %s", route)
		}
	}
	for _, file := range []string{filepath.Join(w.i.root, "admin.kubeconfig"), embedded.Layout{Root: w.i.root}.HostSocket("local")} {
		if _, err := run("test", "-e", file); err != nil {
			w.i.t.Errorf("%s does not exist: %v", file, err)
		}
		for _, right := range []string{"-r", "-w"} {
			if _, err := w.try("test", right, file); err == nil {
				w.i.t.Errorf("the user of the workstation has the right %s for %s", right, file)
			}
		}
	}
}

// addresses returns the addresses of the host in its networks.
func addresses(t *testing.T) (all []string) {
	t.Helper()
	found, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range found {
		if network, ok := a.(*net.IPNet); ok && network.IP.IsGlobalUnicast() {
			all = append(all, network.IP.String())
		}
	}
	if len(all) == 0 {
		t.Fatal("the host has no address")
	}
	return all
}

// openNamespace creates the network namespace. Connections to the address in it reach the same address of this process.
func (w *workstation) openNamespace(address string) {
	t := w.i.t
	t.Helper()
	var listener net.Listener
	var err error
	thread.Throwaway(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return
		}
		var lo netlink.Link
		if lo, err = netlink.LinkByName("lo"); err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err == nil {
			listener, err = net.Listen("tcp", address)
		}
		if err == nil {
			w.namespace, err = os.Open("/proc/thread-self/ns/net")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close(); w.namespace.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go relay(conn, address)
		}
	}()
}

func relay(conn net.Conn, address string) {
	defer conn.Close()
	other, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer other.Close()
	go func() { _, _ = io.Copy(other, conn); other.Close(); conn.Close() }()
	_, _ = io.Copy(conn, other)
}

// try runs a program as the user of the workstation.
func (w *workstation) try(name string, args ...string) (string, error) {
	return run("nsenter", w.arguments("LC_ALL=C.UTF-8", append([]string{name}, args...)...)...)
}

// arguments of nsenter that run a program as the user of the workstation, with a variable.
func (w *workstation) arguments(variable string, program ...string) []string {
	return append([]string{fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), w.namespace.Fd()), "--",
		"setpriv", "--reuid", nobody, "--regid", nobody, "--clear-groups", "--bounding-set", "-all", "--no-new-privs", "--",
		"env", "-i", "HOME=/nonexistent", "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + w.kubeconfig, variable}, program...)
}

func (w *workstation) capstan(args ...string) string {
	w.i.t.Helper()
	began := time.Now()
	out, err := w.try(filepath.Join(w.i.bin, "capstan"), append([]string{"--context", "team-a"}, args...)...)
	if err != nil {
		w.i.t.Fatalf("capstan %v: %v\n%s", args, err, out)
	}
	w.i.t.Logf("capstan %v: %.1f s", args, time.Since(began).Seconds())
	return out
}

// A user with nothing but a kubeconfig looks at a cluster: docs/workstation.md.
func (w *workstation) testWorkstation() {
	t := w.i.t
	if out := w.capstan("get", "clusters", "-n", "team-a"); !strings.Contains(out, "demo") {
		t.Errorf("clusters: %s", out)
	}
	if out := w.capstan("describe", "demo"); !strings.Contains(out, "Cluster team-a/demo") || !strings.Contains(out, "Phase:") {
		t.Errorf("description: %s", out)
	}
	if out := w.capstan("top"); !strings.Contains(out, "FREE MEMORY") || !strings.Contains(out, "local") {
		t.Errorf("top: %s", out)
	}
	if out := w.capstan("status"); !strings.Contains(out, "FREE MEMORY") || !strings.Contains(out, "demo") || !strings.Contains(out, "pods (all namespaces)") {
		t.Errorf("status: %s", out)
	}
	if out := w.capstan("__complete", "get", "kubeconfig", ""); !strings.HasPrefix(out, "demo\n") {
		t.Errorf("completed names: %q", out)
	}
	w.isPluginOfKubectl()
	if out := w.capstan("get", "kubeconfig", "demo"); !strings.Contains(out, "client-certificate-data") {
		t.Errorf("kubeconfig: %s", out)
	}
	w.refusals()
}

// testUpgrade adds a worker, and upgrades all machines.
func (w *workstation) testUpgrade(former string) {
	w.capstan("scale", "cluster", "demo", "--workers", "1")
	w.capstan("upgrade", "cluster", "demo", "--kubernetes-version", harness.KubernetesVersion)
	machines := w.i.kubectl("get", "machines", "-n", "team-a", "-o", "jsonpath={range .items[*]}{.status.nodeInfo.kubeletVersion}{'\\n'}{end}")
	if strings.Count(machines, harness.KubernetesVersion) != 2 || strings.Contains(machines, former) {
		w.i.t.Errorf("versions of the Nodes after the upgrade: %q", machines)
	}
}

// isPluginOfKubectl: with the two links of docs/workstation.md, kubectl runs the program and completes its arguments.
func (w *workstation) isPluginOfKubectl() {
	t := w.i.t
	t.Helper()
	links := filepath.Join(filepath.Dir(w.i.root), "links") // not t.TempDir: the user must be able to enter it
	if err := os.Mkdir(links, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(links) })
	for _, name := range []string{"kubectl-capstan", "kubectl_complete-capstan"} {
		if err := os.Symlink(filepath.Join(w.i.bin, "capstan"), filepath.Join(links, name)); err != nil {
			t.Fatal(err)
		}
	}
	kubectl := filepath.Join(w.i.bin, "kubernetes", harness.KubernetesVersion, "kubectl")
	for want, args := range map[string][]string{
		"Usage:\n  kubectl capstan get": {"capstan", "get", "--help"},
		"demo":                          {"capstan", "get", "clusters", "--context", "team-a", "-n", "team-a"},
		"demo\n":                        {"__complete", "capstan", "--context", "team-a", "get", "kubeconfig", ""},
	} {
		out, err := run("nsenter", w.arguments("PATH="+links+":"+os.Getenv("PATH"), append([]string{kubectl}, args...)...)...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("kubectl %v: expected %q, found %q, %v", args, want, out, err)
		}
	}
}

// refusals checks the errors for a foreign namespace, a missing context, and a command that needs the box of the plane.
func (w *workstation) refusals() {
	for what, test := range map[string]struct {
		args []string
		want string
	}{
		"another namespace":      {[]string{"--context", "team-a", "get", "kubeconfig", "one", "-n", "default"}, "forbidden"},
		"a context that is none": {[]string{"get", "clusters"}, "$KUBECONFIG"},
		"a command of a box":     {[]string{"backup"}, "capstan up"},
	} {
		if out, err := w.try(filepath.Join(w.i.bin, "capstan"), test.args...); err == nil || !strings.Contains(err.Error(), test.want) {
			w.i.t.Errorf("%s: %v %s", what, err, out)
		}
	}
}
