package placement_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// ALL-18: a machine gets only the mounts and devices that its host allows for its namespace.
func TestHostAccess_ALL18(t *testing.T) {
	team := infrav1.AllowedNamespaces{Names: []string{"team"}}
	labelled := infrav1.AllowedNamespaces{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"gpu": "yes"}}}
	h := &infrav1.CapstanHost{Spec: infrav1.CapstanHostSpec{
		AllowedMounts: []infrav1.AllowedMount{
			{Path: "/srv/models", AllowedNamespaces: team},
			{Path: "/srv/out", ReadOnly: ptr.To(false), AllowedNamespaces: team},
			{Path: "/srv/secret", AllowedNamespaces: infrav1.AllowedNamespaces{Names: []string{"other"}}},
		},
		AllowedDevices: []infrav1.AllowedDevice{{Name: "/dev/kvm", AllowedNamespaces: team}, {Name: "example.com/gpu", AllowedNamespaces: labelled}},
	}}
	mount := func(source string, writable bool) placement.Request {
		m := infrav1.HostMount{Source: source, Path: "/mnt/x"}
		if writable {
			m.ReadOnly = ptr.To(false)
		}
		return placement.Request{Mounts: []infrav1.HostMount{m}}
	}
	device := func(name string, count int32) placement.Request {
		return placement.Request{Devices: []infrav1.MachineDevice{{Name: name, Count: count}}}
	}
	for name, tc := range map[string]struct {
		req       placement.Request
		namespace string
		labels    map[string]string
		old       bool
		why       string
	}{
		"allowed":                         {req: mount("/srv/models", false), namespace: "team"},
		"below":                           {req: mount("/srv/models/a/b", false), namespace: "team"},
		"another folder of the same name": {req: mount("/srv/models2", false), namespace: "team", why: "does not allow namespace team to mount /srv/models2"},
		"above":                           {req: mount("/srv", false), namespace: "team", why: "does not allow namespace team to mount /srv:"},
		"another namespace":               {req: mount("/srv/models", false), namespace: "thief", why: "does not allow namespace thief to mount /srv/models"},
		"of another namespace":            {req: mount("/srv/secret", false), namespace: "team", why: "does not allow namespace team to mount /srv/secret"},
		"writable":                        {req: mount("/srv/out/x", true), namespace: "team"},
		"writable where read-only":        {req: mount("/srv/models", true), namespace: "team", why: "allows namespace team to mount /srv/models read-only"},
		"node":                            {req: device("/dev/kvm", 0), namespace: "team"},
		"another node":                    {req: device("/dev/kvm2", 0), namespace: "team", why: "does not allow namespace team to have the device /dev/kvm2"},
		"gpu":                             {req: device("example.com/gpu", 2), namespace: "x", labels: map[string]string{"gpu": "yes"}},
		"gpu without the label":           {req: device("example.com/gpu", 1), namespace: "x", why: "does not allow namespace x to have the device example.com/gpu"},
		"too many gpus":                   {req: device("example.com/gpu", 3), namespace: "x", labels: map[string]string{"gpu": "yes"}, why: "has 2 free devices example.com/gpu, 3 are needed"},
		"an older capstand":               {req: mount("/srv/models", false), namespace: "team", old: true, why: "upgrade its capstand"},
		"nothing on an older capstand":    {namespace: "thief", old: true},
	} {
		candidate := host("a", func(c *placement.Host) {
			c.Permissions, c.HostAccess = placement.Permitted(h, tc.namespace, tc.labels), !tc.old
			c.FreeDevices = map[string]int32{"example.com/gpu": 2}
		})
		tc.req.Namespace = tc.namespace
		_, err := placement.Choose([]placement.Host{candidate}, tc.req)
		if (err == nil) != (tc.why == "") || err != nil && !strings.Contains(err.Error(), tc.why) {
			t.Errorf("%s: got %v, want %q", name, err, tc.why)
		}
		if err != nil && strings.Contains(err.Error(), "secret") && !strings.Contains(tc.why, "secret") {
			t.Errorf("%s: the message names a permission of another namespace: %v", name, err)
		}
	}
}
