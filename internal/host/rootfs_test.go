package host

import (
	"path/filepath"
	"slices"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
)

// At each start, machines get the first configuration with a server that they can reach.
func TestResolvConf(t *testing.T) {
	dir := t.TempDir()
	stub, good, run := filepath.Join(dir, "stub"), filepath.Join(dir, "real"), filepath.Join(dir, "run")
	const servers = "search example.org\nnameserver\t10.1.1.1\n"
	write(t, stub, "nameserver 127.0.0.53\nnameserver ::1\noptions edns0\n")
	write(t, good, servers)
	for name, test := range map[string]struct {
		files []string
		want  string
	}{
		"systemd's stub":         {[]string{stub, good}, servers},
		"the first that is good": {[]string{good, stub}, servers},
		"only a stub":            {[]string{stub}, ""},
		"none":                   {[]string{filepath.Join(dir, "none")}, ""},
	} {
		conf := resolvConf(test.files)
		if string(conf) != test.want {
			t.Errorf("%s: %q, want %q", name, conf, test.want)
		}
		if err := makeRunDir(run, metadata(goodSpec(), 0), nil, conf); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(run, "resolv.conf")
		if there := atomicfile.Exists(path); there != (test.want != "") || there && read(t, path) != test.want {
			t.Errorf("%s: not passed to the machine", name)
		}
	}
}

// capstan-init has the logs of capstand.
func TestMetadataHasFlagsOfLogs(t *testing.T) {
	flags := []string{"--logging-format=json", "--v=4"}
	m := &machine{spec: goodSpec(), host: &platform{config: Config{Logging: flags}, store: store{t.TempDir()}}}
	if got := m.metadata(goodSpec()).Logging; !slices.Equal(got, flags) {
		t.Errorf("found %q", got)
	}
}
