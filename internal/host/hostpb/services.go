package hostpb

import "iter"

// ServiceLists returns the answer of ListServices: the lists that are not empty.
func ServiceLists(all iter.Seq[*SetServicesRequest]) *ListServicesResponse {
	out := &ListServicesResponse{}
	for list := range all {
		if len(list.GetServices()) > 0 {
			out.Lists = append(out.Lists, list)
		}
	}
	return out
}
