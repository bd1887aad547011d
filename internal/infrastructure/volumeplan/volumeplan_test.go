package volumeplan

import (
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// volume is named name, has the volume name of its first part (data-1: data), and belongs to a machine or to none.
func volume(name, host, machine string, change ...func(*infrav1.CapstanVolume)) infrav1.CapstanVolume {
	of, _, _ := strings.Cut(name, "-")
	v := infrav1.CapstanVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       infrav1.CapstanVolumeSpec{HostName: host, MachineName: machine, ClusterName: "c", Owner: "MachineDeployment/db", VolumeName: of},
	}
	for _, f := range change {
		f(&v)
	}
	return v
}

func leaving(v *infrav1.CapstanVolume) { now := metav1.Now(); v.DeletionTimestamp = &now }

func of(owner string) func(*infrav1.CapstanVolume) {
	return func(v *infrav1.CapstanVolume) { v.Spec.Owner = owner }
}

// text writes an option as host: bound volumes, +new volumes.
func text(o Option) string {
	s := o.Host + ":"
	for _, v := range o.Bind {
		s += " " + v.Name
	}
	for _, v := range o.Create {
		s += " +" + v.Name
	}
	return s
}

func TestPlan(t *testing.T) {
	for name, test := range map[string]struct {
		wanted   string
		replicas int
		all      []infrav1.CapstanVolume
		want     []string
		err      string
	}{
		"a first machine":             {"data", 1, nil, []string{": +data"}, ""},
		"a successor":                 {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "")}, []string{"a: data-1"}, ""},
		"a machine that has its part": {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "me")}, []string{"a:"}, ""},
		"a surge":                     {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "old")}, nil, "data-1 belongs to machine old). A rollout must delete"},
		"a second machine":            {"data", 2, []infrav1.CapstanVolume{volume("data-1", "a", "old")}, []string{": +data"}, ""},
		"no replicas":                 {"data", 0, nil, nil, "has 0 replicas"},
		"a volume that is deleted":    {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "", leaving)}, []string{": +data"}, ""},
		"a bound one that is deleted": {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "me", leaving)}, []string{": +data"}, ""},
		"another owner":               {"data", 1, []infrav1.CapstanVolume{volume("data-1", "a", "", of("MachineDeployment/web"))}, []string{": +data"}, ""},
		"several hosts": {"data", 2, []infrav1.CapstanVolume{volume("data-1", "b", ""), volume("data-2", "a", "")},
			[]string{"a: data-2", "b: data-1"}, ""},
		"the host with both first": {"data logs", 2, []infrav1.CapstanVolume{
			volume("data-1", "a", ""), volume("data-2", "b", ""), volume("logs-1", "b", ""), volume("logs-2", "c", ""),
		}, []string{"b: data-2 logs-1"}, ""},
		"a new volume in the template": {"data logs", 1, []infrav1.CapstanVolume{volume("data-1", "a", "")}, []string{"a: data-1 +logs"}, ""},
		"half of it bound": {"data logs", 1, []infrav1.CapstanVolume{volume("data-1", "a", "me"), volume("logs-1", "a", "")},
			[]string{"a: logs-1"}, ""},
		"the other half elsewhere": {"data logs", 1, []infrav1.CapstanVolume{volume("data-1", "a", "me"), volume("logs-1", "b", "")},
			nil, "on host a where its other volume is"},
		"bound on two hosts": {"data logs", 1, []infrav1.CapstanVolume{volume("data-1", "a", "me"), volume("logs-1", "b", "me")},
			nil, "data-1 is on host a, and CapstanVolume logs-1 on host b"},
	} {
		req := Request{Machine: "me", Cluster: "c", Owner: "MachineDeployment/db", Replicas: test.replicas}
		for _, w := range strings.Fields(test.wanted) {
			req.Wanted = append(req.Wanted, infrav1.MachineVolume{Name: w, SizeGiB: 1})
		}
		options, err := Plan(req, test.all)
		var got []string
		for _, o := range options {
			got = append(got, text(o))
			if want := int64(len(o.Create)) << 30; o.VolumeBytes() != want {
				t.Errorf("%s: %d bytes of new volumes, want %d", name, o.VolumeBytes(), want)
			}
			if (o.Host != "") != (o.Volume != "") {
				t.Errorf("%s: host %q because of volume %q", name, o.Host, o.Volume)
			}
		}
		if !slices.Equal(got, test.want) || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: got %q, %v; want %q, %s", name, got, err, test.want, test.err)
		}
	}
}

// The message about a machine that waits has a remedy that its owner has.
func TestRemedy(t *testing.T) {
	for owner, want := range map[string]string{
		"MachineDeployment/db":   "set maxSurge 0 and maxUnavailable 1",
		"MachinePool/db":         "free when its machine is deleted",
		"CapstanControlPlane/db": "set spec.replicas to 3",
	} {
		taken := volume("data-1", "a", "old", of(owner))
		_, err := Plan(Request{Machine: "me", Cluster: "c", Owner: owner, Replicas: 1, Wanted: []infrav1.MachineVolume{{Name: "data"}}}, []infrav1.CapstanVolume{taken})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", owner, err, want)
		}
	}
}

// A namespace can write a CapstanVolume with any host (ALL-18).
func TestPendingBytes_ALL18(t *testing.T) {
	size := func(namespace string, gib int32, id string) func(*infrav1.CapstanVolume) {
		return func(v *infrav1.CapstanVolume) { v.Namespace, v.Spec.SizeGiB, v.Spec.HostID = namespace, gib, id }
	}
	admitting := func(namespace string) ([]infrav1.CapstanHost, error) {
		return []infrav1.CapstanHost{{ObjectMeta: metav1.ObjectMeta{Name: "of-" + namespace}}}, nil
	}
	pending, err := PendingBytes([]infrav1.CapstanVolume{
		volume("data-1", "of-a", "m", size("a", 1, "")), volume("data-2", "of-a", "m", size("a", 2, "")), volume("data-3", "of-a", "m", size("a", 4, "made")),
		volume("data-4", "of-a", "m", size("b", 8, "")), volume("data-5", "of-b", "m", size("b", 16, "")),
	}, admitting)
	if want := map[string]int64{"of-a": 3 << 30, "of-b": 16 << 30}; err != nil || !maps.Equal(pending, want) {
		t.Errorf("expected %v, found %v, %v", want, pending, err)
	}
}
