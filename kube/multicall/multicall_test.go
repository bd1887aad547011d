package multicall

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestSelect(t *testing.T) {
	c := Commands{"etcd": nil, "kubelet": nil}
	for _, tc := range []struct {
		name     string
		args     []string
		want     string
		wantArgs []string
		wantErr  string
	}{
		{name: "symlink", args: []string{"kubelet", "--v=2"}, want: "kubelet", wantArgs: []string{"kubelet", "--v=2"}},
		{name: "symlink with a path", args: []string{"/opt/k8s/etcd"}, want: "etcd", wantArgs: []string{"/opt/k8s/etcd"}},
		{name: "first argument", args: []string{"./capstan-kube", "etcd", "--name", "a"}, want: "etcd", wantArgs: []string{"etcd", "--name", "a"}},
		{name: "a symlink's argument is not a command", args: []string{"kubelet", "etcd"}, want: "kubelet", wantArgs: []string{"kubelet", "etcd"}},
		{name: "nothing asked", args: []string{"capstan-kube"}, wantErr: "no command given; have: etcd, kubelet"},
		{name: "no argv at all", wantErr: "no command given"},
		{name: "unknown", args: []string{"capstan-kube", "emacs"}, wantErr: `unknown command "emacs"; have: etcd, kubelet`},
		{name: "a name that only begins alike", args: []string{"kubelet-old"}, wantErr: "kubelet-old: no command given"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, args, err := c.Select(tc.args)
			if tc.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
					t.Fatalf("got error %v, want %q", err, tc.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got != tc.want || !slices.Equal(args, tc.wantArgs) {
				t.Errorf("got %q %q, want %q %q", got, args, tc.want, tc.wantArgs)
			}
		})
	}
}

func TestRun(t *testing.T) {
	before := os.Args
	t.Cleanup(func() { os.Args = before })

	var seen []string
	c := Commands{
		"kubelet": func() int { seen = os.Args; return 7 },
		"etcd":    func() int { return 0 },
	}
	var stdout, stderr bytes.Buffer

	os.Args = []string{"/x/capstan-kube", "kubelet", "--help"}
	if code := c.Run(&stdout, &stderr); code != 7 {
		t.Errorf("exit code %d, want the command's own", code)
	}
	if want := []string{"kubelet", "--help"}; !slices.Equal(seen, want) {
		t.Errorf("the command saw %q, want %q", seen, want)
	}

	os.Args = []string{"capstan-kube", "--list"}
	if code := c.Run(&stdout, &stderr); code != 0 || stdout.String() != "etcd\nkubelet\n" {
		t.Errorf("--list: code %d, output %q", code, stdout.String())
	}

	os.Args = []string{"capstan-kube", "nope"}
	if code := c.Run(&stdout, &stderr); code != 2 || !strings.Contains(stderr.String(), "nope") {
		t.Errorf("unknown command: code %d, stderr %q", code, stderr.String())
	}
}
