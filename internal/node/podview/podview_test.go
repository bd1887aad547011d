package podview

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

const (
	procMount = `{"destination":"/proc","type":"proc","source":"proc"}`
	devMount  = `{"destination":"/dev","type":"tmpfs","source":"tmpfs"}`
	masked    = `"maskedPaths":["/proc/kcore"]`
	all       = `"resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"access":"rwm"}]}`
	some      = `"resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":1,"minor":3,"access":"rwm"}]}`
)

func config(linux string, mounts ...string) string {
	return `{"ociVersion":"1.2.1","annotations":{"io.kubernetes.cri.container-type":"container"},"mounts":[` + strings.Join(mounts, ",") +
		`],"linux":{` + linux + `,"unknown":18446744073709551615}}`
}

func TestAdd(t *testing.T) {
	views := []string{"/proc/meminfo", "/proc/cpuinfo"}
	user := func(path, kind string) string {
		return `{"destination":"` + path + `","type":"` + kind + `","source":"/x"}`
	}
	for name, test := range map[string]struct {
		config string
		views  []string
		want   string // the destinations of all mounts, in their order
	}{
		"an ordinary container":            {config(masked, procMount, devMount, user("/data", "bind")), views, "/proc /dev /proc/meminfo /proc/cpuinfo /data"},
		"a machine without a CPU limit":    {config(masked, procMount), views[:1], "/proc /proc/meminfo"},
		"a machine without views":          {config(masked, procMount), nil, "/proc"},
		"a privileged container":           {config(all, procMount, devMount), views, "/proc /dev /proc/meminfo /proc/cpuinfo /dev/.lxc/proc"},
		"privileged, with /dev of machine": {config(all, procMount, user("/dev", "bind")), views, "/proc /dev"},
		"procMount Unmasked":               {config(some, procMount, devMount), views, "/proc /dev"},
		"/proc of the machine":             {config(masked, user("/proc", "bind")), views, "/proc"},
		"no proc":                          {config(masked, devMount), views, "/dev"},
		"the user's own meminfo":           {config(masked, procMount, user("/proc/meminfo", "bind")), views, "/proc /proc/cpuinfo /proc/meminfo"},
		"a sandbox":                        {strings.Replace(config(masked, procMount), `"container"`, `"sandbox"`, 1), views, "/proc"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Add([]byte(test.config), test.views)
			if err != nil {
				t.Fatal(err)
			}
			var s spec
			if err := json.Unmarshal(got, &s); err != nil {
				t.Fatal(err)
			}
			var destinations []string
			for _, m := range s.Mounts {
				destinations = append(destinations, m.Destination)
			}
			if found := strings.Join(destinations, " "); found != test.want {
				t.Errorf("mounts %s, want %s", found, test.want)
			}
			if !strings.Contains(string(got), `"unknown":18446744073709551615`) || !strings.Contains(string(got), `"ociVersion":"1.2.1"`) {
				t.Errorf("other fields changed: %s", got)
			}
			if again, err := Add(got, test.views); err != nil || len(again) != len(got) {
				t.Errorf("the second call: %v, %s", err, again)
			}
		})
	}
}

// The views cannot be written by the container.
func TestReadOnly(t *testing.T) {
	got, err := Add([]byte(config(masked, procMount)), Files)
	var s spec
	if err != nil || json.Unmarshal(got, &s) != nil {
		t.Fatal(err, string(got))
	}
	for _, m := range s.Mounts[1:] {
		if m.Source != m.Destination || m.Type != "bind" || !slices.Contains(m.Options, "ro") || !slices.Contains(m.Options, "bind") {
			t.Errorf("mount %+v", m)
		}
	}
}

// Programs see the kernel's files where no view is mounted.
func TestViews(t *testing.T) {
	for _, view := range Views() {
		if !slices.Contains(Files, view) {
			t.Errorf("%s is no file of the list", view)
		}
	}
	mounted, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range Files {
		if want := strings.Contains(string(mounted), " "+file+" "); slices.Contains(Views(), file) != want {
			t.Errorf("%s is a view: %v, want %v", file, !want, want)
		}
	}
}
