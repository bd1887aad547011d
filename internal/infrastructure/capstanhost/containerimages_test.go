package capstanhost

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// The status has what the API accepts of the report of a host. TestContainerImagesOfAHost stores the result.
func TestContainerImages(t *testing.T) {
	long := strings.Repeat("x", 257)
	archives := func(n int, images ...string) (out []*hostpb.ContainerArchive) {
		for i := range n {
			out = append(out, &hostpb.ContainerArchive{Name: fmt.Sprint(i), Images: images})
		}
		return out
	}
	many := strings.Split(strings.Repeat("a,", 19)+"a", ",")
	for name, test := range map[string]struct {
		in    []*hostpb.ContainerArchive
		want  string // names of archives, with the numbers of their images
		shown []infrav1.HostContainerImages
	}{
		"names of archives": {in: []*hostpb.ContainerArchive{{Name: ""}, {Name: long[:256]}, {Name: "a\x1b[31m"}, {Name: "a b"}, {Name: long[:255]}}, want: long[:255] + "=0"},
		"the same name":     {in: []*hostpb.ContainerArchive{{Name: "a", Images: []string{"one"}}, {Name: "a"}}, want: "a=1"},
		"names of images": {in: []*hostpb.ContainerArchive{{Name: "a", Images: []string{"", long, "a b", "a\nb", "good"}}}, want: "a=1",
			shown: []infrav1.HostContainerImages{{Archive: "a", Names: []string{"good"}}}},
		"a long problem": {in: []*hostpb.ContainerArchive{{Name: "a", Problem: long}}, want: "a=0",
			shown: []infrav1.HostContainerImages{{Archive: "a", Problem: long[:256]}}},
		"images of one archive": {in: archives(1, many...), want: "0=16"},
		"images of all":         {in: archives(6, many...), want: "0=16 1=16 2=16 3=16 4=0 5=0"},
		"archives":              {in: archives(65), want: strings.TrimSuffix(wanted(64), " ")},
	} {
		t.Run(name, func(t *testing.T) {
			out := containerImages(&hostpb.HostInfo{ContainerArchives: test.in})
			var got []string
			for _, a := range out {
				got = append(got, fmt.Sprintf("%s=%d", a.Archive, len(a.Names)))
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("archives %q, want %q", got, test.want)
			}
			if test.shown != nil && !reflect.DeepEqual(out, test.shown) {
				t.Errorf("%+v, want %+v", out, test.shown)
			}
		})
	}
}

func wanted(n int) (out string) {
	for i := range n {
		out += fmt.Sprintf("%d=0 ", i)
	}
	return out
}
