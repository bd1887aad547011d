//go:build linux

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/versions"
)

// The commands show what uses a version, and refuse to remove it.
func TestHostVersions(t *testing.T) {
	root, assets := t.TempDir(), t.TempDir()
	write := func(path, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, version := range []string{"v1.35.4", "v1.36.3", "v1.37.0"} {
		write(filepath.Join(assets, "kubernetes", version, "kubelet"), version)
	}
	for _, program := range versions.ControlPlanePrograms {
		write(filepath.Join(assets, "kubernetes", "v1.35.4", program), "")
	}
	write(filepath.Join(root, "hosts", "rack-1", "machines", "id", "spec.json"), `{"namespace":"a","name":"b","kubernetesVersion":"v1.35.4"}`)
	write(filepath.Join(root, "host", "machines", "id", "spec.json"), `{"namespace":"a","name":"c","kubernetesVersion":"v1.35.4"}`)
	write(filepath.Join(root, "state.json"), `{"kubernetesVersion":"v1.36.3"}`)

	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		a := &app{out: &out, errOut: &out, program: "capstan"}
		c := a.command()
		c.SetArgs(append([]string{"--root", root, "--assets", assets, "host", "versions"}, args...))
		err := c.ExecuteContext(t.Context())
		return out.String(), err
	}
	for name, c := range map[string]struct {
		args []string
		want string
		code int
	}{
		"list":                   {args: []string{"list"}, want: "v1.35.4  0 MiB  yes"},
		"list of workers":        {args: []string{"list"}, want: "no: without etcd, etcdctl"},
		"list in JSON":           {args: []string{"list", "--output", "json"}, want: `"the management plane in ` + root},
		"used by machines":       {args: []string{"remove", "v1.35.4"}, want: "machine a/b, machine a/c", code: exitFailed},
		"used by the plane":      {args: []string{"remove", "v1.36.3"}, want: "the management plane", code: exitFailed},
		"unknown":                {args: []string{"remove", "v1.38.0"}, want: "host versions list", code: exitNotFound},
		"URL without a checksum": {args: []string{"add", "https://mirror.example.com/a.tar.gz"}, want: "--sha256", code: exitUsage},
		"checksums":              {args: []string{"add", "a", "b", "--sha256", "x"}, want: "2 sources", code: exitUsage},
		"no programs":            {args: []string{"add", root}, want: "found none", code: exitFailed},
		"unused":                 {args: []string{"remove", "v1.37.0"}, want: "was removed"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := run(c.args...)
			code := exitOK
			if err != nil {
				out, code = out+err.Error(), exitCode(err)
			}
			if code != c.code || !strings.Contains(out, c.want) {
				t.Errorf("expected %q and code %d, got %d: %s", c.want, c.code, code, out)
			}
		})
	}
	if out, err := run("remove", "v1.35.4", "--force"); err != nil || !strings.Contains(out, "was removed") {
		t.Errorf("force: %s %v", out, err)
	}
	a := &app{assets: assets}
	if names := a.completeVersions(nil); len(names) != 1 || names[0] != "v1.36.3" {
		t.Errorf("completion offers %v", names)
	}
}
