package networklist

import (
	"fmt"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

func TestParse(t *testing.T) {
	many := make([]string, most+2)
	for i := range many {
		many[i] = fmt.Sprintf("default/demo/id-%d", i)
	}
	for name, test := range map[string]struct {
		value   string
		want    string
		ignored int
	}{
		"nothing":                   {},
		"one":                       {value: "default/demo/id-1", want: "default/demo/id-1"},
		"two":                       {value: "default/demo/id-1,other/a.b/id-2", want: "default/demo/id-1,other/a.b/id-2"},
		"twice":                     {value: "default/demo/id-1,default/demo/id-1", want: "default/demo/id-1"},
		"a bad one beside one":      {value: "x,default/demo/id-1,", want: "default/demo/id-1", ignored: 2},
		"no id":                     {value: "default/demo", ignored: 1},
		"empty id":                  {value: "default/demo/", ignored: 1},
		"no namespace":              {value: "/demo/id-1", ignored: 1},
		"no name":                   {value: "default//id-1", ignored: 1},
		"a part too many":           {value: "default/demo/id-1/x", ignored: 1},
		"a path":                    {value: "default/demo/..", ignored: 1},
		"an upper-case id":          {value: "default/demo/ID-1", ignored: 1},
		"a space":                   {value: " default/demo/id-1", ignored: 1},
		"a namespace with a dot":    {value: "a.b/demo/id-1", ignored: 1},
		"a long id":                 {value: "default/demo/" + strings.Repeat("x", 64), ignored: 1},
		"a long name":               {value: "default/" + strings.Repeat("x", 254) + "/id-1", ignored: 1},
		"more than can be recorded": {value: strings.Join(many, ","), want: strings.Join(many[:most], ","), ignored: 2},
	} {
		t.Run(name, func(t *testing.T) {
			networks, ignored := Parse(test.value)
			if got := Format(networks); got != test.want || ignored != test.ignored {
				t.Errorf("%.500q, %d ignored; expected %.500q, %d ignored", got, ignored, test.want, test.ignored)
			}
		})
	}
}

func TestWithLost(t *testing.T) {
	machine := func(namespace, name, id string) *hostpb.Machine {
		return &hostpb.Machine{Spec: &hostpb.MachineSpec{Network: &hostpb.Network{Namespace: namespace, Name: name, Id: id, Cidr: "10.1.0.0/24"}}}
	}
	recorded, _ := Parse("default/before/id-0")
	got := Format(WithLost(recorded, []*hostpb.Machine{
		machine("default", "lost", "id-1"), machine("default", "lost", "id-1"), // two machines of one cluster
		machine("default", "before", "id-0"), machine("default", "known", "id-2"), machine("default", "known", "id-3"), machine("copied", "lost", "id-2"),
		machine("default", "a,default/known/id-2", "id-4"), {},
	}, func(n *hostpb.Network) bool {
		return n.GetNamespace() == "default" && (n.GetId() == "id-2" || n.GetId() == "id-3")
	}))
	if want := "default/before/id-0,default/lost/id-1,copied/lost/id-2"; got != want {
		t.Errorf("%q, expected %q", got, want)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "default/demo/id-1", "default/demo/id-1,x", ",/,//,///", "default/demo/../x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		networks, _ := Parse(value)
		if len(networks) > most {
			t.Errorf("%d networks", len(networks))
		}
		written := Format(networks)
		if again, ignored := Parse(written); ignored != 0 || Format(again) != written {
			t.Errorf("%q: written as %q, read as %q", value, written, Format(again))
		}
	})
}
