//go:build e2e && ssh

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestSSH: a machine with sshd and the configuration of docs/users.md. A user of the CapstanConfig logs in with her key.
// Another key, no key, and a user without keys are refused. CAPSTAN_SSHD is a folder with the packages openssh-server and libwrap0 of Debian.
func TestSSH(t *testing.T) {
	packages := os.Getenv("CAPSTAN_SSHD")
	if packages == "" {
		t.Fatal("expected a folder in CAPSTAN_SSHD: run make test-ssh")
	}
	w := newTestNetwork(t)
	h := w.newMachine("ssh", "10.77.0.5")
	keys := t.TempDir()
	mine, server := newKey(t, filepath.Join(keys, "mine")), newKey(t, filepath.Join(keys, "server"))
	newKey(t, filepath.Join(keys, "other"))
	hostKey, err := os.ReadFile(filepath.Join(keys, "server"))
	expect.NoError(t, err)
	spec := documentedServer(t)
	spec.Users[0].SSHAuthorizedKeys = []string{mine}
	spec.Users = append(spec.Users, bootstrapv1.User{Name: "bob", Shell: "/bin/sh"})
	// There is no control plane, so the commands after the start of the node would not run.
	for _, command := range spec.PostCommands {
		spec.PreCommands = append(spec.PreCommands, strings.ReplaceAll(command, "/usr/sbin/sshd", "LD_LIBRARY_PATH=/srv/ssh/lib /srv/ssh/sshd"))
	}
	spec.PostCommands = nil
	data, err := render.CloudConfig(render.Input{
		ClusterName: "e2e", KubernetesVersion: version, Role: nodeconfig.RoleWorker, Endpoint: "10.77.0.2:6443", APIServerPort: 6443, Token: tokenID + "." + tokenSecret,
		Network:      nodeconfig.Network{PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, ServiceDomain: "cluster.local", DNSServiceIP: "10.96.0.10"},
		Certificates: []render.File{{Path: nodeconfig.PKIDir + "/ca.crt", Permissions: "0600", Content: newCluster(t, "10.77.0.2:6443").files[nodeconfig.PKIDir+"/ca.crt"]}},
		Spec:         spec, Secrets: map[bootstrapv1.SecretKeyReference][]byte{{Name: "demo-ssh", Key: "ssh_host_ed25519_key"}: hostKey},
	})
	expect.NoError(t, err)
	copyServer(t, packages, filepath.Join(h.root, "srv/ssh"))
	expect.NoError(t, os.WriteFile(filepath.Join(keys, "known"), []byte(h.ip+" "+server+"\n"), 0o600))
	h.start(data)

	login := func(user, key string) (string, error) {
		args := []string{"-F", "none", "-i", filepath.Join(keys, key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=" + filepath.Join(keys, "known"),
			user + "@" + h.ip, "id -un; cat /etc/hostname"}
		var out []byte
		var err error
		w.inside(w.bridge, func() { out, err = exec.Command("ssh", args...).CombinedOutput() })
		return string(out), err
	}
	harness.Wait(t, "ann logs in", time.Minute, func() error {
		out, err := login("ann", "mine")
		if err == nil && out != "ann\nssh\n" {
			err = fmt.Errorf("the session says %q", out)
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	for _, refused := range [][2]string{{"ann", "other"}, {"ann", "none"}, {"bob", "mine"}, {"root", "mine"}} {
		if out, err := login(refused[0], refused[1]); err == nil || !strings.Contains(out, "Permission denied (publickey") {
			t.Errorf("%s with the key %s: %v, %s", refused[0], refused[1], err, out)
		}
	}
}

// newKey writes a private key, and returns the public key as a line of authorized_keys.
func newKey(t *testing.T, path string) string {
	t.Helper()
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen: %v: %s", err, out)
	}
	public, err := os.ReadFile(path + ".pub")
	expect.NoError(t, err)
	return strings.TrimSpace(string(public))
}

// documentedServer returns the CapstanConfig of docs/users.md with an SSH server.
func documentedServer(t *testing.T) bootstrapv1.CapstanConfigSpec {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "users.md"))
	expect.NoError(t, err)
	for block := range strings.SplitSeq(string(text), "```yaml\n") {
		block, _, _ = strings.Cut(block, "```")
		template := &bootstrapv1.CapstanConfigTemplate{}
		if strings.Contains(block, "name: demo-ssh\n") {
			expect.NoError(t, yaml.UnmarshalStrict([]byte(block), template))
			return template.Spec.Template.Spec
		}
	}
	t.Fatal("docs/users.md has no object demo-ssh")
	return bootstrapv1.CapstanConfigSpec{}
}

// copyServer copies the server and its library into a folder of the machine.
func copyServer(t *testing.T, packages, to string) {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-euc", `mkdir -p "$2/lib"; cp "$1/usr/sbin/sshd" "$2"; cp "$1"/usr/lib/*/libwrap.so.0 "$2/lib"`, "sh", packages, to).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}
