package embedded

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/tracing/collector"
)

// TestSettings: an option changes its setting and no other one, and a plane serves an option only if it was started with its result. Each
// setting has an option.
func TestSettings(t *testing.T) {
	l, dir := Layout{Root: t.TempDir()}, t.TempDir()
	a := Assets{testAssets(t, "v1.36.3", "v1.36.5")}
	hourly := BackupSchedule{BackupTarget: BackupTarget{To: dir, Keep: 5}, Every: metav1.Duration{Duration: time.Hour}}
	spans := collector.Flags{Endpoint: "10.0.0.9:4317"}
	plain := Settings{KubernetesVersion: "v1.36.3", Hosts: []string{"local"}}
	full := Settings{
		KubernetesVersion: "v1.36.3", Hosts: []string{"local"}, Listen: ":7443", APIAddress: "10.0.0.1:6443", HostListenAddress: ":7444",
		Backup: &hourly, CoreFeatureGates: map[string]bool{"MachinePool": false}, Tracing: &spans,
	}
	changed := func(s Settings, change func(*Settings)) *Settings { change(&s); return &s }
	tried := map[string]bool{}
	two := *changed(plain, func(s *Settings) { s.Hosts = []string{"local", "local-2"} })
	// A former version of Cluster API had this gate.
	removed := *changed(plain, func(s *Settings) { s.CoreFeatureGates = map[string]bool{"Removed": true} })
	for name, test := range map[string]struct {
		have    Settings
		options Options
		want    *Settings // nil for a refusal
	}{
		"no options, no settings": {plain, Options{}, &plain},
		"no options":              {full, Options{}, &full},
		"the same options": {full, Options{
			Hosts: 1, KubernetesVersion: "v1.36.3", Listen: ":7443", APIAddress: "10.0.0.1:6443", HostListenAddress: ":7444", Backup: hourly, CoreFeatureGates: "MachinePool=false", Tracing: spans,
		}, &full},
		"other options of a plane": {full, Options{Root: "/x", Logging: []string{"--v=2"}}, &full},

		"Kubernetes":          {full, Options{KubernetesVersion: "v1.36.5"}, changed(full, func(s *Settings) { s.KubernetesVersion = "v1.36.5" })},
		"hosts":               {plain, Options{Hosts: 2}, &two},
		"listen":              {full, Options{Listen: "10.0.0.1:7443"}, changed(full, func(s *Settings) { s.Listen = "10.0.0.1:7443" })},
		"API address":         {full, Options{APIAddress: "10.0.0.2:6443"}, changed(full, func(s *Settings) { s.APIAddress = "10.0.0.2:6443" })},
		"host listen address": {full, Options{HostListenAddress: ":7445"}, changed(full, func(s *Settings) { s.HostListenAddress = ":7445" })},
		"gates":               {full, Options{CoreFeatureGates: "RuntimeSDK=false"}, changed(full, func(s *Settings) { s.CoreFeatureGates = map[string]bool{"RuntimeSDK": false} })},
		"tracing":             {full, Options{Tracing: collector.Flags{Endpoint: "10.0.0.8:4317"}}, changed(full, func(s *Settings) { s.Tracing = &collector.Flags{Endpoint: "10.0.0.8:4317"} })},
		"backups kept": {full, Options{Backup: BackupSchedule{BackupTarget: BackupTarget{Keep: 9}}}, changed(full, func(s *Settings) {
			s.Backup = &BackupSchedule{BackupTarget: BackupTarget{To: dir, Keep: 9}, Every: hourly.Every}
		})},
		"all ended": {full, Options{
			Listen: "none", APIAddress: "none", HostListenAddress: "none", CoreFeatureGates: "none", Tracing: collector.Flags{Endpoint: "none"}, Backup: BackupSchedule{BackupTarget: BackupTarget{To: "none"}},
		}, &plain},

		"fewer hosts":          {two, Options{Hosts: 1}, nil},
		"an older version":     {full, Options{KubernetesVersion: "v1.35.9"}, nil},
		"two hosts, listen":    {full, Options{Hosts: 2}, nil},
		"a removed gate":       {removed, Options{}, nil},
		"removed gates ended":  {removed, Options{CoreFeatureGates: "none"}, &plain},
		"a wrong gate":         {full, Options{CoreFeatureGates: "Unheard=true"}, nil},
		"a wrong address":      {full, Options{APIAddress: "127.0.0.1:6443"}, nil},
		"a wrong collector":    {full, Options{Tracing: collector.Flags{Endpoint: "collector"}}, nil},
		"backups too often":    {full, Options{Backup: BackupSchedule{Every: metav1.Duration{Duration: time.Second}}}, nil},
		"a low port for hosts": {full, Options{HostListenAddress: ":80"}, nil},
		"the port of the API":  {full, Options{HostListenAddress: "10.0.0.2:6443"}, nil},
		"the port of the host": {full, Options{HostListenAddress: "10.0.0.2:7443"}, nil},
		"one port of two addresses": {full, Options{Listen: "10.0.0.1:7443", HostListenAddress: "10.0.0.2:7443"}, changed(full, func(s *Settings) {
			s.Listen, s.HostListenAddress = "10.0.0.1:7443", "10.0.0.2:7443"
		})},
	} {
		got, err := test.have.with(test.options, l, a)
		want := ptr.Deref(test.want, Settings{})
		if !reflect.DeepEqual(got, want) || errors.As(err, &InvalidOptions{}) != (test.want == nil) {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, want)
		}
		running := Status{Settings: test.have, Assets: a.Dir, Build: buildOf(State{Assets: a.Dir, Settings: test.have})}
		if served := test.options.served(running, a.Dir, l); served != reflect.DeepEqual(test.have, want) {
			t.Errorf("%s: served by a plane with %+v: %v", name, test.have, served)
		}
		if err == nil {
			maps.Copy(tried, differences(test.have, got))
		}
	}
	if all := differences(Settings{}, full); len(tried) != len(all) || len(all) != reflect.TypeFor[Settings]().NumField() {
		t.Errorf("expected a value and an option for each setting, found values of %v and options for %v", all, tried)
	}
}

// TestCheckCollector: the manager runs as the system user, and would end at each start without its files.
func TestCheckCollector(t *testing.T) {
	dir := newRoot(t)
	file := func(name string) string { return filepath.Join(dir, name) }
	owner, err := ensureUser()
	expect.NoError(t, errors.Join(err, os.Mkdir(dir, 0o755), os.WriteFile(file("empty.crt"), nil, 0o644)))
	for _, name := range []string{"own", "of root"} {
		expect.NoError(t, makeAuthority(file(name+".crt"), file(name+".key"), name))
	}
	expect.NoError(t, errors.Join(os.Chown(file("own.key"), owner.uid, owner.gid), os.Chown(file("of root.key"), 0, 0), os.Chmod(file("of root.key"), 0o640)))
	for name, test := range map[string]struct {
		flags *collector.Flags
		wrong string
	}{
		"none":                   {nil, ""},
		"no files":               {&collector.Flags{Endpoint: "c:1"}, ""},
		"readable files":         {&collector.Flags{CAFile: file("of root.crt"), CertFile: file("own.crt"), KeyFile: file("own.key")}, ""},
		"a key of root":          {&collector.Flags{CertFile: file("of root.crt"), KeyFile: file("of root.key")}, "permission denied"},
		"a missing authority":    {&collector.Flags{CAFile: file("missing.crt")}, "no such file or directory; correct the files, or end traces with `capstan up --tracing-endpoint none`"},
		"an empty authority":     {&collector.Flags{CAFile: file("empty.crt")}, "expected a certificate"},
		"no key":                 {&collector.Flags{CertFile: file("own.crt")}, "--tracing-key-file"},
		"the key of another one": {&collector.Flags{CertFile: file("of root.crt"), KeyFile: file("own.key")}, "does not match"},
	} {
		err := checkCollector(test.flags)
		if (err == nil) != (test.wrong == "") || err != nil && !strings.Contains(err.Error(), test.wrong) {
			t.Errorf("%s: %v, want %q", name, err, test.wrong)
		}
	}
	expect.NoError(t, os.WriteFile(file("after"), nil, 0o600)) // with the rights of the process
}

// differences returns the names of the settings that differ.
func differences(a, b Settings) map[string]bool {
	out := map[string]bool{}
	for i := range reflect.TypeFor[Settings]().NumField() {
		if !reflect.DeepEqual(reflect.ValueOf(a).Field(i).Interface(), reflect.ValueOf(b).Field(i).Interface()) {
			out[reflect.TypeFor[Settings]().Field(i).Name] = true
		}
	}
	return out
}

// TestSettingsAreFlat: the settings are fields of state.json and of the status, which other programs read.
func TestSettingsAreFlat(t *testing.T) {
	for _, object := range []any{State{}, Status{}} {
		data, err := json.Marshal(object)
		var fields map[string]any
		if err := errors.Join(err, json.Unmarshal(data, &fields)); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"assets", "kubernetesVersion", "hosts"} {
			if _, ok := fields[name]; !ok {
				t.Errorf("expected the field %s, found %s", name, data)
			}
		}
	}
}
